"""A family of published models: its config.json in both directions, its classes, its weight map.

`hf` is a key of config.json or the whole object, `jax` a field of `TransformerConfig` or of one of
its parts, with a dot: "norm.eps".
"""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from jaxformer.config import TransformerConfig, with_fields
from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.pretrained.model_specs import Kind, ModelSpec
from jaxformer.pretrained.weight_map import Entry, WeightMap, entry, linear, zero_entry

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Names in config.json -> our names; of several names for one the first is written."""

# Larger numbers are a mistake or an attack.
_MAX = {int: 2**24, float: 1e12, bool: 1}

_NUMBERS = {int: "a whole number", float: "a number"}

_IGNORED_KEYS = frozenset(
    """_name_or_path architectures model_type torch_dtype dtype transformers_version use_cache
    tokenizer_class prefix id2label label2id num_labels problem_type finetuning_task
    task_specific_params gradient_checkpointing initializer_range chunk_size_feed_forward
    output_attentions output_hidden_states return_dict output_past is_encoder_decoder
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens
    begin_suppress_tokens max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    exponential_decay_length_penalty remove_invalid_values""".split()
)
"""Keys of all families that do not change what the model computes."""

_REFUSED_KEYS = ("quantization_config", "per_layer_config")
"""Keys that change what the model of any family computes."""


class Setting(NamedTuple):
    """One or more keys of config.json that define something of the model."""

    keys: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    """(config.json, our fields of the settings before) -> our fields. Raises `ConfigError` for
    values that are not supported."""
    write: Callable[[TransformerConfig], dict[str, Any]]
    """Our config -> keys and values of config.json. Raises `ConfigError` for a value
    that the family does not have."""


def field(
    hf: str,
    jax: str,
    default: int | float | bool | None | Callable[[Mapping[str, Any]], int],
    *,
    least: int = 0,
    value_of: Callable[[Any], Any] | None = None,
) -> Setting:
    """A number of at least `least`, or a truth value, with one key and one field.

    `default` is the meaning of an absent key: a value, or a function of our fields read before.
    `value_of` gives the value to write of our config; None: that of the field.
    """
    written = attrgetter(jax) if value_of is None else value_of

    def read(config_json: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        absent = default(fields) if callable(default) else default
        value = config_json.get(hf)
        if value is None or value == absent:
            return {jax: absent}
        kind = int if absent is None else type(absent)
        return {jax: parse_number(hf, value, kind, least)}

    return Setting((hf,), read, lambda config: {hf: written(config)})


def optional_field(
    hf: str,
    jax: str,
    default: int | float | None,
    *,
    kind: type = int,
    least: int = 0,
    value_of: Callable[[Any], Any] | None = None,
) -> Setting:
    """A number of at least `least`, or null, which means None; an absent key means `default`.

    `value_of` gives the value to write of our config; None: that of the field.
    """
    written = attrgetter(jax) if value_of is None else value_of

    def read(config_json: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        value = config_json.get(hf, default)
        return {jax: None if value is None else parse_number(hf, value, kind, least)}

    return Setting((hf,), read, lambda config: {hf: written(config)})


def enum_field(hf: str, jax: str, default: str | bool, names: Mapping[Any, Any]) -> Setting:
    """A choice among `names`, which maps values in config.json to ours.

    `default` is the meaning of an absent key; of several names for one value the first is written.
    """

    def read(config_json: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        value = config_json.get(hf, default)
        if not isinstance(value, str | bool) or value not in names:
            raise unsupported(hf, value, *names)
        return {jax: names[value]}

    def write(config: TransformerConfig) -> dict[str, Any]:
        value = attrgetter(jax)(config)
        for name, ours in names.items():
            if ours == value:
                return {hf: name}
        raise ConfigError(f"{jax}={value!r} has no {hf}")

    return Setting((hf,), read, write)


def tied_output(default: bool) -> Setting:
    """Whether the output is the transpose of the embedding; `default` where the key is absent."""
    names = {True: "output", False: "none"}
    return enum_field("tie_word_embeddings", "embeddings.tied", default, names)


def const_field(hf: str, only: Any) -> Setting:
    """A key of which only one value is supported; null and an absent key mean this value too."""

    def read(config_json: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        value = only if config_json.get(hf) is None else config_json[hf]
        if type(value) is not type(only) or value != only:
            raise unsupported(hf, value, only)
        return {}

    return Setting((hf,), read, lambda _: {hf: only})


def unsupported(key: str, value: Any, *allowed: Any) -> ConfigError:
    """The error for a value of config.json that only has the supported values `allowed`."""
    return ConfigError(
        f"{key}={as_text(value)} is not supported: only {', '.join(map(json.dumps, allowed))}"
    )


def as_text(value: Any) -> str:
    """The JSON of `value` for a message, shortened between words."""
    return shorten(json.dumps(value))


def parse_number(key: str, value: Any, kind: type, least: int = 0) -> Any:
    """`value` as `kind` (int, float or bool); `ConfigError` for another type or out of range."""
    fits = isinstance(value, int) if kind is int else isinstance(value, int | float)
    fits = isinstance(value, bool) if kind is bool else fits and not isinstance(value, bool)
    if not fits or not least <= value <= _MAX[kind]:
        limits = f"from {least} to {_MAX[kind]:,}"
        allowed = "true or false" if kind is bool else f"{_NUMBERS[kind]} {limits}"
        raise ConfigError(f"{key}={as_text(value)}, but it must be {allowed}")
    return kind(value)


def warn_ignored(keys: Iterable[str], name: str) -> None:
    """Warns of `keys` of config.json that the model `name` of `transformers` does not read."""
    keys = sorted(keys)
    if keys:
        said = f"config.json: {', '.join(keys)} ignored: {name} of transformers does not read it"
        warnings.warn(shorten(said, 300), stacklevel=2)


def identity(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """`spec` itself."""
    return spec


class Family(NamedTuple):
    """All that reads and writes the folders of a `model_type`.

    Tensors have the names that they have in a model with a head.
    """

    model_type: str
    """`model_type` in config.json."""
    architectures: Mapping[str, Kind]
    """The kind of model of each class; the first class of a kind is written."""
    constants: Mapping[str, Any]
    """Fields of our config that all models of the family share; `positions` is one of them."""
    settings: Sequence[Setting]
    """The readers and writers of the other fields."""
    weight_map: Callable[[ModelSpec, Mapping[str, Any]], WeightMap]
    """A spec and config.json -> the entries of its weight map."""
    prefix: str
    """The beginning of tensor names; the names of a model without a head lack it."""
    head_prefixes: tuple[str, ...]
    """The beginnings of names of tensors of heads, which never have `prefix`."""
    adapt: Callable[[ModelSpec, Collection[str]], ModelSpec] = identity
    """A spec and the names of a folder's tensors -> the spec of what the folder stores."""
    renamed_endings: Mapping[str, str] = {}
    """Old endings of tensor names and their current ones."""
    ignored_tensors: str = r"(?!)"
    """A regular expression for names of tensors that are no parameters."""
    unused_tensors: Mapping[Kind, str] = {}
    """Regular expressions for names of tensors that a kind of model has no use for."""
    aliases: Mapping[str, str] = {}
    """Second names of keys of config.json and their first ones; where both are given, the second
    name counts, as in `transformers`."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys of config.json that do not change what the model computes."""
    classifier_tensors: tuple[str, ...] = ()
    """The tensors of classifiers whose first axis is that of the classes."""


def token_layers(spec: ModelSpec, embedding: str, output: str = "lm_head.weight") -> list[Entry]:
    """The entries of a decoder's embedding, and of its output layer or its classifier."""
    table = f"{spec.body}embedding/table"
    if spec.kind == "decoder_classifier":
        head = [entry("head/kernel", "score.weight", linear()), zero_entry("head/bias")]
        return [entry(table, embedding), *head]
    if spec.config.ties_output:
        return [Entry((table,), (embedding, output))]
    return [entry(table, embedding), entry("output/kernel", output, linear())]


def read_config(family: Family, hf: Mapping[str, Any]) -> TransformerConfig:
    """Our config for the config.json `hf`; `ConfigError` names what is not supported.

    Warns of keys that no setting reads: the family's class in `transformers` does not read them.
    """
    for key in _REFUSED_KEYS:
        if hf.get(key):
            raise ConfigError(f"{key}={as_text(hf[key])} is not supported: it changes the model")
    hf = {**hf, **{first: hf[second] for second, first in family.aliases.items() if second in hf}}
    known = {key for setting in family.settings for key in setting.keys}
    known |= {*family.aliases, *family.ignored_keys, *_IGNORED_KEYS, *_REFUSED_KEYS}
    warn_ignored((key for key in hf.keys() - known if hf[key]), family.model_type)
    fields: dict[str, Any] = {}
    for setting in family.settings:
        fields |= setting.read(hf, fields)
    sizes = TransformerConfig(vocab_size=1, d_model=1, d_ff=1, num_heads=1)  # all are replaced
    return with_fields(sizes, {**family.constants, **fields})


def write_config(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`, without ids of tokens.

    Raises `ConfigError`, naming them, for fields that the family does not support.
    """
    names = [name for name, kind in family.architectures.items() if kind == spec.kind]
    if not names:
        raise ConfigError(f"it has no {spec.kind.replace('_', ' ')}")
    positions, scheme = spec.config.positions, family.constants["positions"]
    if type(positions) is not type(scheme):
        raise ConfigError(f"positions={positions}, but it has {scheme}")
    hf: dict[str, Any] = {"architectures": names[:1], "model_type": family.model_type}
    for setting in family.settings:
        hf |= setting.write(spec.config)
    read = ModelSpec(spec.kind, read_config(family, hf), spec.classes)
    written = {entry.hf[0] for entry in family.weight_map(spec, hf) if entry.hf}
    read = family.adapt(read, written)
    wanted, offered = spec.effective_fields(), read.effective_fields()
    wrong = [
        f"{name}={wanted[name]!r}, but it has {offered.get(name)!r}"
        for name in wanted
        if wanted[name] != offered.get(name)
    ]
    if read.kind != spec.kind or wrong:
        raise ConfigError("; ".join(wrong) or f"it has no {spec.kind.replace('_', ' ')}")
    return hf


def canonical_names(family: Family, names: Iterable[str]) -> dict[str, str]:
    """The name in the weight map -> the name in the folder, without ignored tensors.

    Raises `DataError` for two names of one tensor.
    """
    names = list(names)
    bare = not any(name.startswith(family.prefix) for name in names)
    stored_names: dict[str, str] = {}
    for name in names:
        canonical = _with_current_ending(family, name)
        if bare and not canonical.startswith(family.head_prefixes):
            canonical = family.prefix + canonical
        if re.search(family.ignored_tensors, canonical):
            continue
        if canonical in stored_names:
            raise DataError(f"{stored_names[canonical]} and {name} are two names of one tensor")
        stored_names[canonical] = name
    return stored_names


def _with_current_ending(family: Family, name: str) -> str:
    for old, new in family.renamed_endings.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
