"""Checks for the fields of a configuration: types, choices, ranges."""

import re
from dataclasses import fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from jaxformer.errors import ConfigError

_TYPES = {
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a string"),
    NoneType: (NoneType, "None"),
}


def check_types(config: Any) -> None:
    """Raises `ConfigError` for a field of the dataclass whose value has another type.

    Fields of type int, float, bool, str or None, and unions of these, are checked.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Training:
    ...     steps: int
    >>> check_types(Training(1.5))
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: steps=1.5 is a float, but it must be an integer: give an integer
    """
    for field in fields(config):
        types, value = get_args(field.type) or (field.type,), getattr(config, field.name)
        if not all(isinstance(one, type) and one in _TYPES for one in types):
            continue
        accepted = tuple(_TYPES[one][0] for one in types)
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in types):
            allowed = " or ".join(_TYPES[one][1] for one in types)
            raise ConfigError(
                f"{field.name}={value!r} is a {type(value).__name__}, but it must be {allowed}: "
                f"give {allowed}"
            )


def check_choices(config: Any) -> None:
    """Raises `ConfigError` for a field of the dataclass whose `Literal` does not list its value.

    >>> from dataclasses import dataclass
    >>> from typing import Literal
    >>> @dataclass
    ... class Training:
    ...     schedule: Literal["cosine", "constant"]
    >>> check_choices(Training("linear"))
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: schedule='linear' is unknown: give one of cosine, constant
    """
    for field in fields(config):
        choices = get_args(field.type) if get_origin(field.type) is Literal else ()
        value = getattr(config, field.name)
        if choices and value not in choices:
            raise ConfigError(
                f"{field.name}={value!r} is unknown: give one of {', '.join(choices)}"
            )


def check_at_least(config: Any, least: float, *names: str) -> None:
    """Raises `ConfigError` for one of the fields `names` below `least`; None passes.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Training:
    ...     steps: int
    >>> check_at_least(Training(0), 1, "steps")
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: steps=0, but it must be at least 1
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value}, but it must be at least {least}")


def check_fraction(config: Any, *names: str) -> None:
    """Raises `ConfigError` for one of the fields `names` below 0, or not below 1.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Training:
    ...     dropout_rate: float
    >>> check_fraction(Training(1.5), "dropout_rate")
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: dropout_rate=1.5: it must be in [0, 1)
    """
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name}={value}: it must be in [0, 1)")


def check_pattern(config: Any, name: str) -> None:
    """Raises `ConfigError` unless the field `name` is a regular expression.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Training:
    ...     freeze: str
    >>> check_pattern(Training("("), "freeze")
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: freeze='(' is not a regular expression: ...
    """
    pattern = getattr(config, name)
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{name}={pattern!r} is not a regular expression: {error}") from error
