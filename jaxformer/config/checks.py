"""Checks of the fields of a configuration: each annotation says which values are allowed.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Training(Checked):
...     steps: Count = 100
...     dropout_rate: UnitInterval = 0.0
>>> Training(steps=0)
Traceback (most recent call last):
    ...
jaxformer.errors.ConfigError: steps=0, but it must be at least 1
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; a square bracket includes the end, a round one does not."""

    low: float
    high: float = math.inf
    bounds: Literal["[)", "()", "(]", "[]"] = "[)"

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.bounds[0] == "[" else value > self.low
        return above and (value <= self.high if self.bounds[1] == "]" else value < self.high)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low}" if self.bounds[0] == "[" else f"above {self.low}"
        return f"in {self.bounds[0]}{self.low}, {self.high}{self.bounds[1]}"


_PATTERN = "regular expression"

Count = Annotated[int, Range(1)]
"""An integer of at least 1."""
Natural = Annotated[int, Range(0)]
"""An integer of at least 0."""
Seed = Annotated[int, Range(0, 2**32)]
"""A seed of random numbers; JAX's have 32 bits."""
Positive = Annotated[float, Range(0, bounds="()")]
"""A finite number above 0."""
NonNegative = Annotated[float, Range(0)]
"""A finite number of at least 0."""
UnitInterval = Annotated[float, Range(0, 1)]
"""A number of at least 0 and below 1."""
Regex = Annotated[str, _PATTERN]
"""A regular expression."""

_TYPES: dict[Any, tuple[type, str, str]] = {
    int: (Integral, "an integer", "integers"),
    float: (Real, "a number", "numbers"),
    bool: (bool, "True or False", "True or False"),
    str: (str, "a string", "strings"),
    NoneType: (NoneType, "None", "None"),
}


@dataclass(frozen=True)
class Checked:
    """The base of configurations: `ConfigError` for a value that a field's annotation excludes.

    int, float (finite), bool, str, None, dataclasses, functions, `Literal`, the annotated types
    above, tuples of one of these such as `tuple[Count, ...]`, and unions of these are checked. A
    number of NumPy becomes Python's, and a whole number becomes a float where only a float is
    allowed, so that equal configurations are written alike, wherever they were read from.
    """

    def __post_init__(self) -> None:
        of_self: Any = type(self)
        check_fields(self, _hints(of_self))


def check_fields(value: Any, kinds: Mapping[str, Any]) -> None:
    """Checks the fields `kinds` of `value`: name -> annotation. Raises `ConfigError`.

    It is for `Checked` and for modules, so that both refuse the same values by the same sentences.
    """
    for name, kind in kinds.items():
        field = getattr(value, name)
        if isinstance(field, np.generic):  # as np.linspace gives them
            field = field.item()
        options = alternatives(kind)
        mistakes = [_mistake(field, one) for one in options]
        if all(mistakes):
            raise ConfigError(f"{name}={field!r}{_sentence(field, options, mistakes)}")
        object.__setattr__(value, name, _of_its_type(field, options))


def is_union(kind: Any) -> bool:
    """Whether `kind` is a choice of types."""
    return get_origin(kind) in (Union, UnionType)


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types among which the union `kind` leaves the choice; `kind` itself if it is none."""
    return get_args(kind) if is_union(kind) else (kind,)


def _of_its_type(value: Any, kinds: tuple[Any, ...]) -> Any:
    """`value`, which one of `kinds` allows, with its whole numbers as floats where they must be."""
    items = [get_args(kind)[0] for kind in kinds if get_origin(kind) is tuple]
    if isinstance(value, tuple) and len(items) == 1:
        return tuple(_of_its_type(item, alternatives(items[0])) for item in value)
    plain = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    number: Any = value
    return float(number) if is_whole and float in plain and int not in plain else value


class _Mistake(NamedTuple):
    """Why a value is not allowed; empty text: because of its type."""

    text: str = ""


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _mistake(value: Any, kind: Any) -> _Mistake | None:
    """The reason why `value` is not of the type `kind`; None if it is, or is not checked."""
    arguments = get_args(kind)
    if get_origin(kind) is Literal:
        allowed = ", ".join(map(str, arguments))
        return None if value in arguments else _Mistake(f" is unknown: give one of {allowed}")
    if get_origin(kind) is Callable or kind is Callable:
        return None if callable(value) else _Mistake()
    if get_origin(kind) is tuple and arguments[1:] == (Ellipsis,):
        if not isinstance(value, tuple):
            return _Mistake()
        mistake = next(filter(None, (_mistake(item, arguments[0]) for item in value)), None)
        return mistake and _Mistake(mistake.text.replace("but it", "but each"))
    if get_origin(kind) is Annotated:
        return _mistake(value, arguments[0]) or _out_of_range(value, arguments[1])
    if kind in _TYPES:
        is_kind = isinstance(value, _TYPES[kind][0])
        is_kind &= kind is bool or not isinstance(value, bool)
        if is_kind and kind is float and not math.isfinite(value):
            return _Mistake(", but it must be finite")
        return None if is_kind else _Mistake()
    if is_dataclass(kind) and isinstance(kind, type):
        return None if isinstance(value, kind) else _Mistake()
    return None


def _out_of_range(value: Any, allowed: Any) -> _Mistake | None:
    if allowed is _PATTERN:
        try:
            re.compile(value)
        except re.error as error:
            return _Mistake(f" is not a regular expression: {error}")
        return None
    return None if value in allowed else _Mistake(f", but it must be {allowed}")


def _sentence(value: Any, kinds: tuple[Any, ...], mistakes: list[_Mistake | None]) -> str:
    """The mistake of a value that is of none of `kinds`, and what is allowed."""
    texts = [mistake.text for mistake in mistakes if mistake and mistake.text]
    if len(texts) == len(kinds) or (texts and not isinstance(value, bool | NoneType)):
        return texts[0]
    classes = [kind for kind in kinds if isinstance(kind, type) and kind not in _TYPES]
    kinds = tuple(kind for kind in kinds if not {*classes}.intersection(_bases(kind)))
    allowed = " or ".join(dict.fromkeys(map(_described, kinds)))
    return f" is a {type(value).__name__}, but it must be {allowed}: give {allowed}"


def _bases(kind: Any) -> tuple[Any, ...]:
    return kind.__mro__[1:] if isinstance(kind, type) else ()


def _described(kind: Any, several: bool = False) -> str:
    if get_origin(kind) is Annotated:
        return _described(get_args(kind)[0], several)
    if get_origin(kind) is tuple:
        return f"a tuple of {_described(get_args(kind)[0], several=True)}"
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is Callable or kind is Callable:
        return "functions" if several else "a function"
    if kind in _TYPES:
        _, one, many = _TYPES[kind]
        return many if several else one
    return f"a {kind.__name__}" if isinstance(kind, type) else str(kind)
