"""A family of published models: its config.json in both directions, its classes, its weight map."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxformer.config import TransformerConfig, with_fields
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained.config_keys import Key, as_text, warn_ignored
from jaxformer.pretrained.model_specs import Kind, ModelSpec
from jaxformer.pretrained.weight_map import WeightMap

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


def identity(spec: ModelSpec, names: Collection[str]) -> ModelSpec:
    """`spec` itself."""
    return spec


class Family(NamedTuple):
    """The rules by which the folders of a `model_type` are read and written.

    Tensors have the names that they have in a model with a head; `prefix` and `head_prefixes` say
    how the names of a model without one differ.
    """

    model_type: str
    """`model_type` in config.json."""
    architectures: Mapping[str, Kind]
    """The kind of model of each class; the first class of a kind is written."""
    constants: Mapping[str, Any]
    """Fields of our config that all models of the family share; `positions` is one of them."""
    keys: Sequence[Key]
    """The keys of the other fields."""
    weight_map: Callable[[ModelSpec, Mapping[str, Any]], WeightMap]
    """A spec and config.json -> the entries of its weight map."""
    prefix: str
    """The first part of tensors' names, such as "bert."; a model without a head lacks it."""
    head_prefixes: tuple[str, ...]
    """The first parts of the names of heads' tensors, such as "lm_head."; these lack `prefix`."""
    adapt: Callable[[ModelSpec, Collection[str]], ModelSpec] = identity
    """A spec and the names of a folder's tensors -> the spec of what the folder stores."""
    renamed_endings: Mapping[str, str] = {}
    """Old endings of tensor names and their current ones."""
    ignored_tensors: str = r"(?!)"
    """A regular expression for names of tensors that are no parameters."""
    unused_tensors: Mapping[Kind, str] = {}
    """Regular expressions for names of tensors that a kind of model has no use for."""
    aliases: Mapping[str, str] = {}
    """Alias -> name of keys of config.json; where both are given the alias counts, as in
    `transformers`."""
    ignored_keys: frozenset[str] = frozenset()
    """Keys of config.json that do not change what the model computes."""
    inputs_first: str = r"(?!)"
    """A regular expression for names of weights that are stored as [in, out]: Conv1D layers."""
    classifier_tensors: tuple[str, ...] = ()
    """The tensors of classifiers whose first axis is the classes."""


def read_config(family: Family, hf: Mapping[str, Any]) -> TransformerConfig:
    """Our config for the config.json `hf`; `ConfigError` names what is not supported.

    Warns of keys that are not the family's: its class in `transformers` does not read them.
    """
    for name in _REFUSED_KEYS:
        if hf.get(name):
            raise ConfigError(f"{name}={as_text(hf[name])} is not supported: it changes the model")
    hf = dict(hf)
    for alias, name in family.aliases.items():
        if alias in hf:
            hf[name] = hf[alias]
    known = {name for key in family.keys for name in key.names}
    known |= {*family.aliases, *family.ignored_keys, *_IGNORED_KEYS, *_REFUSED_KEYS}
    warn_ignored((name for name in hf.keys() - known if hf[name]), family.model_type)
    fields: dict[str, Any] = {}
    for key in family.keys:
        fields |= key.read(hf, fields)
    sizes = TransformerConfig(vocab_size=1, d_model=1, d_ff=1, num_heads=1)  # all are replaced
    return with_fields(sizes, {**family.constants, **fields})


def write_config(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`, without ids of tokens.

    Raises `ConfigError`, naming them, for fields that the family does not support.
    """
    classes = [name for name, kind in family.architectures.items() if kind == spec.kind]
    if not classes:
        raise ConfigError(f"it has no {spec.kind.replace('_', ' ')}")
    positions = spec.config.positions
    scheme = family.constants["positions"]
    if type(positions) is not type(scheme):
        raise ConfigError(f"positions={positions}, but it has {scheme}")
    hf: dict[str, Any] = {"architectures": classes[:1], "model_type": family.model_type}
    for key in family.keys:
        hf |= key.write(spec.config)
    read = ModelSpec(spec.kind, read_config(family, hf), spec.classes)
    written = {entry.names[0] for entry in family.weight_map(spec, hf) if entry.names}
    read = family.adapt(read, written)
    # What is written must mean the same when it is read again.
    wanted = spec.effective_fields()
    offered = read.effective_fields()
    wrong = [
        f"{name}={wanted[name]!r}, but it has {offered.get(name)!r}"
        for name in wanted
        if wanted[name] != offered.get(name)
    ]
    if read.kind != spec.kind or wrong:
        raise ConfigError("; ".join(wrong) or f"it has no {spec.kind.replace('_', ' ')}")
    return hf


# The first part of all tensors' names of a wrapped model -> the wrapper, and what to save instead.
_WRAPPERS = {
    "_orig_mod.": "torch.compile; save model._orig_mod",
    "module.": "DataParallel and DistributedDataParallel; save model.module",
    "base_model.model.": (
        "peft; save model.merge_and_unload(), or the adapter alone with model.save_pretrained"
    ),
}


def refuse_wrapped(names: Iterable[str]) -> None:
    """Raises `DataError` for names that tensors have in a wrapper of torch or peft."""
    for name in names:
        for prefix, cure in _WRAPPERS.items():
            if name.startswith(prefix):
                raise DataError(
                    f"{name} begins with {prefix!r}, which is written by {cure}, or take it from "
                    f"each name: {{name.removeprefix({prefix!r}): tensor for name, tensor in "
                    "tensors.items()}"
                )


def canonical_names(family: Family, names: Iterable[str]) -> dict[str, str]:
    """The name in the weight map -> the name in the folder, without ignored tensors.

    Raises `DataError` for two names of one tensor, and for names in a wrapper of torch or peft.
    """
    names = list(names)
    refuse_wrapped(names)
    has_no_head = not any(name.startswith(family.prefix) for name in names)
    stored_names: dict[str, str] = {}
    for name in names:
        canonical = _with_current_ending(family, name)
        if has_no_head and not canonical.startswith(family.head_prefixes):
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
