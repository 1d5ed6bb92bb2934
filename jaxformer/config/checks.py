"""Checks for the fields of a configuration: types, choices, ranges.

>>> from dataclasses import dataclass
>>> @dataclass
... class Training:
...     steps: int
>>> check_at_least(Training(0), 1, "steps")
Traceback (most recent call last):
    ...
jaxformer.errors.ConfigError: steps=0, but it must be at least 1
"""

import re
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

from jaxformer.errors import ConfigError

_TYPES = {
    int: (Integral, "an integer", "integers"),
    float: (Real, "a number", "numbers"),
    bool: (bool, "True or False", "True or False"),
    str: (str, "a string", "strings"),
    NoneType: (NoneType, "None", "None"),
}


def check_types(config: Any) -> None:
    """Raises `ConfigError` for a field of the dataclass whose value has another type.

    Fields of type int, float, bool, str or None, tuples of one of these such as
    `tuple[int, ...]`, and unions of all these are checked.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        is_union = isinstance(field.type, UnionType)
        types = [_element(one) for one in (get_args(field.type) if is_union else (field.type,))]
        if any(element not in _TYPES for element, _ in types):
            continue
        if not any(_fits(value, element, many) for element, many in types):
            allowed = " or ".join(
                f"a tuple of {_TYPES[x][2]}" if many else _TYPES[x][1] for x, many in types
            )
            raise ConfigError(
                f"{field.name}={value!r} is a {type(value).__name__}, but it must be {allowed}: "
                f"give {allowed}"
            )


def _element(kind: Any) -> tuple[Any, bool]:
    """The type itself, or that of the elements of a tuple, and whether it is a tuple."""
    if get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,):
        return get_args(kind)[0], True
    return (kind if isinstance(kind, type) else None), False


def _fits(value: Any, kind: type, many: bool) -> bool:
    if many:
        return isinstance(value, tuple) and all(_fits(one, kind, False) for one in value)
    return isinstance(value, _TYPES[kind][0]) and (kind is bool or not isinstance(value, bool))


def check_choices(config: Any) -> None:
    """Raises `ConfigError` for a field of the dataclass whose `Literal` does not list its value."""
    for field in fields(config):
        choices = get_args(field.type) if get_origin(field.type) is Literal else ()
        value = getattr(config, field.name)
        if choices and value not in choices:
            raise ConfigError(
                f"{field.name}={value!r} is unknown: give one of {', '.join(choices)}"
            )


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Raises `ConfigError` for one of the fields `names` below `least`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}, but it must be at least {least}")


def check_fraction(config: Any, *names: str) -> None:
    """Raises `ConfigError` for one of the fields `names` below 0, or not below 1."""
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name}={value}, but it must be in [0, 1)")


def check_pattern(config: Any, name: str) -> None:
    """Raises `ConfigError` unless the field `name` is a regular expression."""
    pattern = getattr(config, name)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}={pattern!r} is not a regular expression: {error}") from error
