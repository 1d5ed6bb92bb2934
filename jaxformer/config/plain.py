"""Configurations as plain JSON and back, with errors that name a field.

A field may hold a *part*: one of the frozen dataclasses in the union that annotates it, as in
`positions: Sinusoidal | Rotary`. In JSON the name of the part, its class's in lower snake
case, stands under "type" beside its fields: {"type": "rotary", "base": 1e6}. The name alone stands
for the part with its defaults. A part or a function of your own has the name
package.module:name.
"""

import contextlib
import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxformer.config.checks import is_union
from jaxformer.config.import_names import import_by_name, is_import_name, name_of
from jaxformer.errors import ConfigError

_cached_hints = cache(typing.get_type_hints)


def type_hints(kind: Any) -> dict[str, Any]:
    """The type of each field of the dataclass `kind`."""
    return _cached_hints(kind)


def part_kinds(kind: Any) -> dict[str, type]:
    """The dataclasses among which the union `kind` leaves the choice, by their names.

    A class that says `is_only_a_base` of itself stands for classes of the user's own, and is none.
    """
    options = typing.get_args(kind) if is_union(kind) else ()
    parts = [option for option in options if is_dataclass(option)]
    return {
        _snake(option.__name__): option
        for option in parts
        if not vars(option).get("is_only_a_base", False)
    }


def find_part(kind: Any, name: str, where: str) -> Any:
    """The dataclass called `name` that a field annotated with `kind` may hold.

    A name package.module:name that does not name a dataclass is returned as it is where `kind`
    allows a `str`. Raises `ConfigError`, with the names that are allowed, for any other name.
    """
    known = part_kinds(kind)
    matches = [known[key] for key in known if key.replace("_", "") == _letters(name)]
    if matches:
        return matches[0]
    if is_import_name(name):
        value = import_by_name(name, where)
        base = _common_base([*known.values()])
        if is_dataclass(value) and issubclass(value, base):
            return value
        if not is_dataclass(value) and str in typing.get_args(kind):
            return name
        raise ConfigError(f"{where}={name!r} is no {base.__name__}: name a dataclass that is one")
    raise ConfigError(
        f"{where}={name!r} is unknown: give one of {', '.join(known)}, or your own as "
        "package.module:name"
    )


def _common_base(kinds: list[type]) -> type:
    """The most derived class of which all `kinds` are subclasses."""
    return next(base for base in kinds[0].__mro__ if all(issubclass(one, base) for one in kinds))


def to_plain(value: Any, kind: Any = None) -> Any:
    """`value`, such as a dataclass, as plain JSON; `kind` is the annotation of a field that has it.

    Raises `ConfigError` for a value that JSON cannot hold.
    """
    if is_dataclass(type(value)):
        hints = type_hints(type(value))
        named = {f.name: to_plain(getattr(value, f.name), hints[f.name]) for f in _fields(value)}
        return {"type": part_name(value, kind)} | named if part_kinds(kind) else named
    if isinstance(value, list | tuple):
        kinds = item_kinds(kind, len(value)) or [None] * len(value)
        return [to_plain(item, each) for item, each in zip(value, kinds, strict=True)]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if callable(value):
        return name_of(value, "a field")
    raise ConfigError(f"{value!r} cannot be written to config.json: use plain values")


def from_plain(kind: Any, value: Any, where: str = "") -> Any:
    """Plain JSON `value` as the type `kind`; `where` is its dotted name.

    A field that is absent has its default. `ConfigError` names what is unknown, of another type,
    or absent though it has no default.
    """
    origin, options, parts = typing.get_origin(kind), typing.get_args(kind), part_kinds(kind)
    if parts and (isinstance(value, str) or isinstance(value, dict) and "type" in value):
        return _build_part(kind, value, where)
    if len(parts) > 1 and isinstance(value, dict):
        raise ConfigError(f"{where} has no type: give one of {', '.join(parts)}")
    if is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if is_union(kind):
        return from_plain(_choose(options, value, where), value, where)
    if origin is Literal and value in options:
        return value
    if origin in (tuple, list) and isinstance(value, list):
        items = item_kinds(kind, len(value))
        if items is not None:
            pairs = enumerate(zip(items, value, strict=True))
            return origin(from_plain(item, v, f"{where}.{i}") for i, (item, v) in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: from_plain(options[1], v, f"{where}.{key}") for key, v in value.items()}
    if origin is Callable and isinstance(value, str) and is_import_name(value):
        return import_by_name(value, where)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is Any or type(value) is kind or (kind is types.NoneType and value is None):
        return value
    raise ConfigError(f"{where} is {json.dumps(value)}, but must be {shown(kind)}")


def _build_part(kind: Any, value: str | dict[str, Any], where: str) -> Any:
    fields = {"type": value} if isinstance(value, str) else dict(value)
    part = find_part(kind, str(fields.pop("type")), where)
    return part if isinstance(part, str) else _build_dataclass(part, fields, where)


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {json.dumps(value)}, but must hold {shown(kind)}")
    prefix = f"{where}." if where else ""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    wrong = [
        f"{prefix}{name} is unknown{_did_you_mean(name, names)}"
        for name in sorted(value.keys() - names)
    ]
    absent = names - value.keys() - _defaulted(kind)
    wrong += [f"{prefix}{name} is missing" for name in sorted(absent)]
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)} (for {shown(kind)})")
    hints = type_hints(kind)
    return kind(
        **{name: from_plain(hints[name], item, prefix + name) for name, item in value.items()}
    )


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is most like `name`, as a question; "" where none is."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {near[0]}?" if near else ""


def _choose(options: tuple, value: Any, where: str) -> Any:
    """The one of the types `options` that `value` fits."""
    fitting = []
    for option in options:
        with contextlib.suppress(ConfigError):
            from_plain(option, value, where)
            fitting.append(option)
    exact = [option for option in fitting if option is type(value)]
    if len(exact or fitting) != 1:
        names = " or ".join(map(shown, fitting or options))
        raise ConfigError(f"{where} is {json.dumps(value)}, but must be exactly one of {names}")
    return (exact or fitting)[0]


def _defaulted(kind: type) -> set[str]:
    """The names of the fields of the dataclass `kind` that have a default."""
    missing = dataclasses.MISSING
    fields = _fields(kind)
    return {f.name for f in fields if f.default is not missing or f.default_factory is not missing}


def item_kinds(kind: Any, count: int) -> list[Any] | None:
    """The type of each of `count` items of the tuple or list type `kind`; None if they differ."""
    if typing.get_origin(kind) not in (tuple, list):
        return None
    items = typing.get_args(kind)
    if typing.get_origin(kind) is list or items[-1] is ...:
        return [items[0]] * count
    return list(items) if len(items) == count else None


def _fields(config: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(config) if field.init]


def is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def part_name(part: Any, kind: Any) -> str:
    """The name of `part` in a field annotated with `kind`."""
    known = {option: name for name, option in part_kinds(kind).items()}
    return known.get(type(part)) or name_of(type(part), "type")


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def shown(kind: Any) -> str:
    """The type `kind` as a person writes it: int, a|b, int ... for a tuple."""
    if kind is types.NoneType:
        return "None"
    options = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, options))
    if is_union(kind):
        return "|".join(map(shown, options))
    if typing.get_origin(kind) is Callable:
        return "package.module:name"
    if typing.get_origin(kind) in (tuple, list):
        return f"{shown(options[0])} ..." if options[-1] is ... else " ".join(map(shown, options))
    return kind.__name__ if isinstance(kind, type) else str(kind)
