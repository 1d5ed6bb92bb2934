"""Their config.json and our `TransformerConfig`: settings that are read in both directions."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxformer.config import ConfigError, TransformerConfig

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Their names of the activations; the first of two names for one is written."""

# More is no model, but a mistake or an attack.
_MOST = {int: 2**24, float: 1e12, bool: 1}

_NUMBERS = {int: "a whole number", float: "a number"}

_FREE = frozenset(
    """_name_or_path architectures model_type torch_dtype dtype transformers_version use_cache
    tokenizer_class prefix id2label label2id num_labels problem_type finetuning_task
    task_specific_params gradient_checkpointing initializer_range chunk_size_feed_forward
    output_attentions output_hidden_states return_dict output_past
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids suppress_tokens
    begin_suppress_tokens max_length min_length do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    exponential_decay_length_penalty remove_invalid_values""".split()
)
"""Keys of any family that do not change what its weights compute."""


class Setting(Protocol):
    """One or more keys of theirs that say something of the model."""

    @property
    def keys(self) -> Sequence[str]:
        """The keys."""

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of ours that `theirs` sets; `ours` has those of the settings before."""

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The keys of theirs that say what `config` says."""


class Copied(NamedTuple):
    """A number or a truth value that both have.

    `default` is what their absent key means: a value, or a function of our fields so far. A
    number is `least` or more.
    """

    theirs: str
    ours: str
    default: int | float | bool | None | Callable[[Mapping[str, Any]], int]
    least: int = 0

    @property
    def keys(self) -> Sequence[str]:
        """The key."""
        return (self.theirs,)

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The field; `ConfigError` for a value that is none."""
        default = self.default(ours) if callable(self.default) else self.default
        value = theirs.get(self.theirs)
        if value is None or value == default:
            return {self.ours: default}
        kind = int if default is None else type(default)
        return {self.ours: number(self.theirs, value, kind, self.least)}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The key."""
        return {self.theirs: getattr(config, self.ours)}


class Named(NamedTuple):
    """A choice that both have, with a name of theirs for each of ours."""

    theirs: str
    ours: str
    default: str | bool
    names: Mapping[Any, Any]

    @property
    def keys(self) -> Sequence[str]:
        """The key."""
        return (self.theirs,)

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """The field; `ConfigError` for a choice that is not there."""
        value = theirs.get(self.theirs, self.default)
        if not isinstance(value, str | bool) or value not in self.names:
            raise ConfigError(
                f"{self.theirs}={json.dumps(value)} cannot be said here: only "
                f"{', '.join(map(json.dumps, self.names))}"
            )
        return {self.ours: self.names[value]}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The key; `ConfigError` for a choice of ours that they do not have."""
        value = getattr(config, self.ours)
        for name, ours in self.names.items():
            if ours == value:
                return {self.theirs: name}
        raise ConfigError(f"{self.ours}={value!r} has no {self.theirs}")


class Fixed(NamedTuple):
    """A switch of theirs that only has one position here; an absent key stands for it too."""

    theirs: str
    value: Any

    @property
    def keys(self) -> Sequence[str]:
        """The key."""
        return (self.theirs,)

    def read(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        """No field; `ConfigError` for another position."""
        value = theirs.get(self.theirs, self.value)
        if type(value) is not type(self.value) or value != self.value:
            raise ConfigError(
                f"{self.theirs}={json.dumps(value)} cannot be said here: only "
                f"{json.dumps(self.value)}"
            )
        return {}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """The key."""
        return {self.theirs: self.value}


def number(key: str, value: Any, kind: type, least: int = 0) -> Any:
    """`value` as the `kind` int, float or bool; `ConfigError` for what is no such number."""
    fits = isinstance(value, int) if kind is int else isinstance(value, int | float)
    fits = isinstance(value, bool) if kind is bool else fits and not isinstance(value, bool)
    if not fits or not least <= value <= _MOST[kind]:
        limits = f"from {least} to {_MOST[kind]:,}"
        what = "true or false" if kind is bool else f"{_NUMBERS[kind]} {limits}"
        raise ConfigError(f"{key}={json.dumps(value)[:80]}, but it must be {what}")
    return kind(value)


def read_settings(
    settings: Sequence[Setting], free: frozenset[str], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of ours that `theirs` sets.

    Raises `ConfigError` for a key that none of `settings` reads, unless it is switched off
    (null, false, empty) or among `free` or what is free in all families.
    """
    known = {key for setting in settings for key in setting.keys} | free | _FREE
    for key, value in theirs.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise ConfigError(
                f"{key}={json.dumps(value)[:80]} is not known here: if it does not change what "
                "the model computes, take it out of config.json"
            )
    ours: dict[str, Any] = {}
    for setting in settings:
        ours |= setting.read(theirs, ours)
    return ours
