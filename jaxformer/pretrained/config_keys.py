"""Keys of config.json, and fields of our config with the same meaning, in both directions.

`key` is a key of config.json, `field` a field of `TransformerConfig` or of one of its parts, with a
dot: "norm.eps".
"""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError, shorten

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


class Key(NamedTuple):
    """One or more keys of config.json that define something of the model."""

    names: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    """(config.json, our fields of the keys before) -> our fields. Raises `ConfigError` for values
    that are not supported."""
    write: Callable[[TransformerConfig], dict[str, Any]]
    """Our config -> keys and values of config.json. Raises `ConfigError` for a value
    that the family does not have."""


def number(
    key: str,
    field: str,
    default: int | float | bool | None | Callable[[Mapping[str, Any]], int | float],
    *,
    kind: type | None = None,
    least: int = 0,
    nullable: bool = False,
    value_of: Callable[[Any], Any] | None = None,
) -> Key:
    """A number of at least `least`, or a truth value, with one key and one field.

    `default` is the meaning of an absent key: a value, or a function of our fields read before.
    null means None if `nullable`, else `default`. `kind` is the type; None: the type of `default`.
    `value_of` gives the value to write of our config; None: the field's value.
    """
    value_to_write = attrgetter(field) if value_of is None else value_of

    def read(config_json: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        absent = default(fields) if callable(default) else default
        value = config_json.get(key, absent)
        if value is None and nullable:
            return {field: None}
        if value is None or value == absent:
            return {field: absent}
        expected = kind
        if expected is None:
            expected = int if absent is None else type(absent)
        return {field: parse_number(key, value, expected, least)}

    return Key((key,), read, lambda config: {key: value_to_write(config)})


def choice(key: str, field: str, default: str | bool, names: Mapping[Any, Any]) -> Key:
    """A choice among `names`, which maps values in config.json to ours.

    `default` is the meaning of an absent key; of several names for one value the first is written.
    """

    def read(config_json: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        value = config_json.get(key, default)
        if not isinstance(value, str | bool) or value not in names:
            raise unsupported(key, value, *names)
        return {field: names[value]}

    def write(config: TransformerConfig) -> dict[str, Any]:
        value = attrgetter(field)(config)
        for name, ours in names.items():
            if ours == value:
                return {key: name}
        raise ConfigError(f"{field}={value!r} has no {key}")

    return Key((key,), read, write)


def tied_output(default: bool) -> Key:
    """Whether the output is the transpose of the embedding; `default` where the key is absent."""
    names = {True: "output", False: "none"}
    return choice("tie_word_embeddings", "embeddings.tied", default, names)


def constant(key: str, only: Any) -> Key:
    """A key of which only one value is supported; null and an absent key mean this value too."""
    is_truth_value = isinstance(only, bool)

    def read(config_json: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        value = only if config_json.get(key) is None else config_json[key]
        if isinstance(value, bool) is not is_truth_value or value != only:  # 0 is 0.0
            raise unsupported(key, value, only)
        return {}

    return Key((key,), read, lambda _: {key: only})


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
    if kind is bool or isinstance(value, bool):  # in Python a truth value is an int, too
        fits = kind is bool and isinstance(value, bool)
    elif kind is int:
        fits = isinstance(value, int)
    else:
        fits = isinstance(value, int | float)
    if not fits or not least <= value <= _MAX[kind]:
        allowed = "true or false"
        if kind is not bool:
            allowed = f"{_NUMBERS[kind]} from {least} to {_MAX[kind]:,}"
        raise ConfigError(f"{key}={as_text(value)}, but it must be {allowed}")
    return kind(value)


def warn_ignored(keys: Iterable[str], name: str) -> None:
    """Warns of `keys` of config.json that the model `name` of `transformers` does not read."""
    keys = sorted(keys)
    if keys:
        message = f"config.json: {', '.join(keys)} ignored: {name} of transformers does not read it"
        warnings.warn(shorten(message, 300), stacklevel=2)
