"""Configurations as JSON or TOML and back, with errors that name a field."""

import contextlib
import dataclasses
import enum
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxformer.errors import ConfigError

T = TypeVar("T")

_OWN = re.compile(r"(?!(?:hf|sacrebleu):)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_own(name: str) -> bool:
    """Whether `name` has the form package.module:name, which no built-in name has."""
    return _OWN.fullmatch(name) is not None


def split_step(name: str) -> tuple[Path, str]:
    """The folder and what follows the "@" in RUN@STEP; a folder with an "@" is taken whole."""
    path, at, which = name.rpartition("@")
    return (Path(path), which) if at and not Path(name).is_dir() else (Path(name), "")


def plain(value: Any) -> Any:
    """`value`, such as a dataclass, as plain JSON; `ConfigError` for a value that JSON has not."""
    return json.loads(json.dumps(value, default=_plain))


def build(kind: Any, value: Any, where: str = "") -> Any:
    """Plain JSON `value` as the type `kind`; `where` is its dotted name.

    A field that is absent has its default. `ConfigError` names what is unknown, of another type,
    or absent though it has no default.
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        return build(_choose(options, value, where), value, where)
    if origin is Literal and value in options:
        return value
    if origin in (tuple, list) and isinstance(value, list):
        items = options if origin is tuple and options[-1] is not ... else options[:1] * len(value)
        if len(items) == len(value):
            pairs = enumerate(zip(items, value, strict=True))
            return origin(build(item, v, f"{where}.{i}") for i, (item, v) in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: build(options[1], v, f"{where}.{key}") for key, v in value.items()}
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and str(value) in kind.__members__:
        return kind[str(value)]
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is Any or type(value) is kind or (kind is types.NoneType and value is None):
        return value
    raise ConfigError(f"{where} is {json.dumps(value)}, but must be {_name(kind)}")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON or TOML file, or in the config.json of a run's folder.

    Raises `ConfigError` for a path that is not there, and for a file of another format.
    """
    path = path / "config.json" if path.is_dir() else path
    if path.suffix not in (".json", ".toml"):
        raise ConfigError(f"{path} is neither a .json nor a .toml file, nor the folder of a run")
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object, but holds {json.dumps(found):.60}")
    return found


def with_fields(config: T, fields: dict[str, Any], path: Path, *, complete: bool) -> T:
    """The dataclass `config` with `fields`, nested as in its JSON, in place of its own.

    If `fields` are `complete`, an absent one has the default of its class, as in a run that is
    older than the field. Raises `ConfigError`, which names `path`, for a field that is unknown or
    of another type.
    """
    try:
        return build(type(config), fields if complete else _merged(plain(config), fields))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def with_overrides(config: T, overrides: Mapping[str, Any]) -> T:
    """The dataclass `config` with other values of some fields, given by their dotted names."""
    nested: dict[str, Any] = {}
    for name, value in overrides.items():
        *groups, last = name.split(".")
        inner = nested
        for word in groups:
            inner = inner.setdefault(word, {})
        inner[last] = plain(value)
    return build(type(config), _merged(plain(config), nested))


def with_options(presets: Mapping[str, Any], kind: Callable[..., T]) -> dict[str, T]:
    """`presets` as the dataclass `kind`, which has further fields with defaults."""
    return {
        name: kind(**{each.name: getattr(preset, each.name) for each in dataclasses.fields(preset)})
        for name, preset in presets.items()
    }


def type_of(kind: Any, name: str) -> Any:
    """The type of the field with the dotted `name` in the dataclass `kind`."""
    for word in name.split("."):
        kind = typing.get_type_hints(kind)[word]
    return kind


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {name: _merged(below.get(name), value) for name, value in above.items()}


def with_defaults(stored: Any, config: Any) -> Any:
    """`stored`, and the default of each field that it lacks but the dataclass `config` has."""
    if not isinstance(stored, dict) or not dataclasses.is_dataclass(config):
        return stored
    defaults = plain(_defaults(type(config)))
    inner = {
        field.name: with_defaults(stored[field.name], getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name in stored
    }
    return defaults | stored | inner


def flat(value: Any, name: str = "") -> dict[str, str]:
    """`dotted.name` -> JSON text of each value that is not an object."""
    if not isinstance(value, dict):
        return {name: json.dumps(value)}
    prefix = f"{name}." if name else ""
    return {k: v for key, inner in value.items() for k, v in flat(inner, prefix + key).items()}


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {json.dumps(value)}, but must hold {_name(kind)}")
    prefix = f"{where}." if where else ""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    wrong = [f"{prefix}{name} is unknown" for name in sorted(value.keys() - names)]
    absent = names - value.keys() - _defaults(kind).keys()
    wrong += [f"{prefix}{name} is missing" for name in sorted(absent)]
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)} (for {_name(kind)})")
    hints, given = typing.get_type_hints(kind), names & value.keys()
    return kind(**{name: build(hints[name], value[name], prefix + name) for name in given})


def _defaults(kind: type) -> dict[str, Any]:
    """The default of each field of the dataclass `kind` that has one."""
    found = {}
    for field in dataclasses.fields(kind):
        if field.init and field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.init and field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return found


def _choose(options: tuple, value: Any, where: str) -> Any:
    """The one of the types `options` that `value` fits."""
    fitting = []
    for option in options:
        with contextlib.suppress(ConfigError):
            build(option, value, where)
            fitting.append(option)
    exact = [option for option in fitting if option is type(value)]
    if len(exact or fitting) != 1:
        names = " or ".join(map(_name, fitting or options))
        raise ConfigError(f"{where} is {json.dumps(value)}, but must be exactly one of {names}")
    return (exact or fitting)[0]


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    raise ConfigError(f"{value!r} cannot be written to config.json: use plain values")
