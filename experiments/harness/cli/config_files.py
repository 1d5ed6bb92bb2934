"""Configurations as JSON or TOML and back, with errors that name a field.

A field may hold a *part*: one of the frozen dataclasses in the union that annotates it, as in
`positions: Sinusoidal | Rotary`. In JSON the name of the part, that of its class in lower snake
case, stands under "type" beside its fields: {"type": "rotary", "base": 1e6}. The name alone stands
for the part with its defaults. A part of your own, like any value of your own, has the name
package.module:name.
"""

import contextlib
import dataclasses
import importlib
import json
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from jaxformer.errors import ConfigError
from jaxformer.storage import to_path

T = TypeVar("T")

_NAME = re.compile(r"(?!hf:)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

_cached_hints = cache(typing.get_type_hints)


def type_hints(kind: Any) -> dict[str, Any]:
    """The type of each field of the dataclass `kind`."""
    return _cached_hints(kind)


def split_step(name: str) -> tuple[Path, str]:
    """The folder and what follows the "@" in RUN@STEP; a folder with an "@" is taken whole."""
    path, at, step = name.rpartition("@")
    whole = to_path(name)
    return (to_path(path), step) if at and not whole.is_dir() else (whole, "")


def part_kinds(kind: Any) -> dict[str, type]:
    """The dataclasses among which the union `kind` leaves the choice, by their names."""
    options = typing.get_args(kind) if is_union(kind) else ()
    return {_snake(option.__name__): option for option in options if _is_dataclass(option)}


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
        if _is_dataclass(value):
            return value
        if str in typing.get_args(kind):
            return name
        raise ConfigError(f"{where}={name!r} is no dataclass: name the class of a part")
    raise ConfigError(
        f"{where}={name!r} is unknown: give one of {', '.join(known)}, or your own as "
        "package.module:name"
    )


def plain(value: Any, kind: Any = None) -> Any:
    """`value`, such as a dataclass, as plain JSON; `kind` is the annotation of a field that has it.

    Raises `ConfigError` for a value that JSON cannot hold.
    """
    if _is_dataclass(type(value)):
        hints = type_hints(type(value))
        named = {f.name: plain(getattr(value, f.name), hints[f.name]) for f in _fields(value)}
        return {"type": part_name(value, kind)} | named if part_kinds(kind) else named
    if isinstance(value, list | tuple):
        kinds = _item_kinds(kind, len(value)) or [None] * len(value)
        return [plain(item, each) for item, each in zip(value, kinds, strict=True)]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(f"{value!r} cannot be written to config.json: use plain values")


def build(kind: Any, value: Any, where: str = "") -> Any:
    """Plain JSON `value` as the type `kind`; `where` is its dotted name.

    A field that is absent has its default. `ConfigError` names what is unknown, of another type,
    or absent though it has no default.
    """
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if part_kinds(kind) and (isinstance(value, str) or isinstance(value, dict) and "type" in value):
        return _build_part(kind, value, where)
    if _is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if is_union(kind):
        return build(_choose(options, value, where), value, where)
    if origin is Literal and value in options:
        return value
    if origin in (tuple, list) and isinstance(value, list):
        items = _item_kinds(kind, len(value))
        if items is not None:
            pairs = enumerate(zip(items, value, strict=True))
            return origin(build(item, v, f"{where}.{i}") for i, (item, v) in pairs)
    if origin is dict and isinstance(value, dict):
        return {key: build(options[1], v, f"{where}.{key}") for key, v in value.items()}
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is Any or type(value) is kind or (kind is types.NoneType and value is None):
        return value
    raise ConfigError(f"{where} is {json.dumps(value)}, but must be {shown(kind)}")


def from_words(kind: Any, words: Sequence[str], where: str) -> Any:
    """The value of the type `kind` that the words after the option `where` stand for.

    The word None is None where `kind` allows it. Raises `ConfigError` for words that do not fit.
    """
    options = typing.get_args(kind) if is_union(kind) else (kind,)
    if types.NoneType in options and list(words) == ["None"]:
        return None
    for option in options:
        with contextlib.suppress(ConfigError):
            return build(option, _from_words(option, words), where)
    given = json.dumps(" ".join(words), ensure_ascii=False)
    raise ConfigError(f"{where} is {given}, but must be {shown(kind)}")


def _from_words(kind: Any, words: Sequence[str]) -> Any:
    """The plain JSON that `words` stand for; the words as they are where they do not fit."""
    items = _item_kinds(kind, len(words))
    if items is not None:
        return [_from_words(item, [word]) for item, word in zip(items, words, strict=True)]
    if len(words) != 1:
        return list(words)
    if kind is bool:
        return {"true": True, "false": False}.get(words[0].lower(), words[0])
    with contextlib.suppress(ValueError):
        return kind(words[0]) if kind in (int, float) else words[0]
    return words[0]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON or TOML file, or in the config.json of a run's folder.

    Raises `ConfigError` for a path that does not exist, and for a file of another format.
    """
    path = path / "config.json" if path.is_dir() else path
    if path.suffix not in (".json", ".toml"):
        raise ConfigError(f"{path} is neither a .json nor a .toml file, nor the folder of a run")
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, but holds {json.dumps(content):.60}")
    return content


def with_fields(config: T, fields: dict[str, Any], path: Path) -> T:
    """The dataclass `config` with `fields`, nested as in its JSON, in place of its own.

    Raises `ConfigError`, which names `path`, for a field that is unknown or of another type.
    """
    try:
        return build(type(config), _merged(plain(config), fields))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def with_overrides(config: T, overrides: Mapping[str, Any]) -> T:
    """The dataclass `config` with other values of some fields, given by their dotted names."""
    kinds = settings(config)
    nested: dict[str, Any] = {}
    for name in sorted(overrides):  # the name of a part before its fields
        *groups, last = name.split(".")
        inner = nested
        for word in groups:
            if isinstance(inner.get(word), str):
                inner[word] = {"type": inner[word]}
            inner = inner.setdefault(word, {})
        inner[last] = plain(overrides[name], kinds.get(name))
    return build(type(config), _merged(plain(config), nested))


def with_options(presets: Mapping[str, Any], kind: Callable[..., T]) -> dict[str, T]:
    """`presets` as the dataclass `kind`, which has further fields with defaults."""
    return {
        name: kind(**{each.name: getattr(preset, each.name) for each in dataclasses.fields(preset)})
        for name, preset in presets.items()
    }


def settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """The type of each setting of the dataclass `config`, by its dotted name.

    A part is a setting, and so are the fields of all parts that may stand there. Of a class
    `config` the parts of your own that it holds are not known.
    """
    kinds: dict[str, Any] = {}
    hints = type_hints(config if isinstance(config, type) else type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        kind, value = hints[name], getattr(config, name, None)
        parts: list[Any] = [*part_kinds(kind).values()]
        if parts:
            kinds[prefix + name] = kind
        elif _is_dataclass(kind):
            parts = [kind]
        else:
            kinds[prefix + name] = kind
        if _is_dataclass(type(value)):
            parts = [*parts, value]
        for part in parts:
            kinds |= settings(part, f"{prefix}{name}.")
    return kinds


def has_setting(config: Any, name: str) -> bool:
    """Whether `config` has the dotted `name`, which may be a field of a part it does not hold."""
    for word in name.split("."):
        if not hasattr(config, word):
            return False
        config = getattr(config, word)
    return True


def flat(value: Any, name: str = "") -> dict[str, str]:
    """`dotted.name` -> JSON text of each value that is not an object."""
    if not isinstance(value, dict):
        return {name: json.dumps(value)}
    prefix = f"{name}." if name else ""
    return {k: v for key, inner in value.items() for k, v in flat(inner, prefix + key).items()}


def _merged(below: Any, above: Any) -> Any:
    """`above` over `below`; a part that `above` names begins with its defaults."""
    if not isinstance(below, dict) or not isinstance(above, dict) or "type" in above:
        return above
    return below | {name: _merged(below.get(name), value) for name, value in above.items()}


def _build_part(kind: Any, value: str | dict[str, Any], where: str) -> Any:
    fields = {"type": value} if isinstance(value, str) else dict(value)
    part = find_part(kind, str(fields.pop("type")), where)
    return part if isinstance(part, str) else _build_dataclass(part, fields, where)


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {json.dumps(value)}, but must hold {shown(kind)}")
    prefix = f"{where}." if where else ""
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    wrong = [f"{prefix}{name} is unknown" for name in sorted(value.keys() - names)]
    absent = names - value.keys() - _defaulted(kind)
    wrong += [f"{prefix}{name} is missing" for name in sorted(absent)]
    if wrong:
        raise ConfigError(f"{'; '.join(wrong)} (for {shown(kind)})")
    hints = type_hints(kind)
    return kind(**{name: build(hints[name], item, prefix + name) for name, item in value.items()})


def _choose(options: tuple, value: Any, where: str) -> Any:
    """The one of the types `options` that `value` fits."""
    fitting = []
    for option in options:
        with contextlib.suppress(ConfigError):
            build(option, value, where)
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


def _item_kinds(kind: Any, count: int) -> list[Any] | None:
    """The type of each of `count` items of the tuple or list type `kind`; None if they differ."""
    if typing.get_origin(kind) not in (tuple, list):
        return None
    items = typing.get_args(kind)
    if typing.get_origin(kind) is list or items[-1] is ...:
        return [items[0]] * count
    return list(items) if len(items) == count else None


def _fields(config: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(config) if field.init]


def is_union(kind: Any) -> bool:
    """Whether `kind` is a choice of types."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_dataclass(kind: Any) -> bool:
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
    if typing.get_origin(kind) in (tuple, list):
        return f"{shown(options[0])} ..." if options[-1] is ... else " ".join(map(shown, options))
    return kind.__name__ if isinstance(kind, type) else str(kind)


def is_import_name(name: str) -> bool:
    """Whether `name` has the form package.module:name, which no built-in name has."""
    return _NAME.fullmatch(name) is not None


def import_by_name(name: str, option: str) -> Any:
    """The function or class `package.module:name`, which was given to `option`.

    Raises `ConfigError` for a name of another form, a module or attribute that does not exist, and
    a value that cannot be called.
    """
    if not is_import_name(name):
        raise ConfigError(f"{option}={name!r} is not a name of the form package.module:name")
    path, _, attributes = name.partition(":")
    try:
        value = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # the module exists, and imports one that does not
        raise ConfigError(
            f"{option}={name!r}: there is no module {error.name!r}: start the command in the "
            "folder that holds it, or put that folder on PYTHONPATH"
        ) from error
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            raise ConfigError(f"{option}={name!r}: the module {path!r} has no {attributes!r}")
        value = getattr(value, attribute)
    if not callable(value):
        kind = type(value).__name__
        raise ConfigError(
            f"{option}={name!r} is not callable, but {kind}: name a function or class"
        )
    return value


def name_of(value: Any, option: str) -> str:
    """The name `package.module:name` under which `import_by_name` finds `value` again.

    Raises `ConfigError` for a value without one, such as a lambda or a function within a function.
    """
    path, attributes = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    main = path == "__main__"
    if main:  # a module that was started with python -m has a name besides
        path = getattr(sys.modules[path].__spec__, "name", "")
    name = f"{path}:{attributes}"
    if not is_import_name(name) or not (main or import_by_name(name, option) is value):
        raise ConfigError(
            f"{option}={value!r} cannot be found again by a name, so the run could not record what "
            "it was built with: define it at the top level of a module that can be imported"
        )
    return name
