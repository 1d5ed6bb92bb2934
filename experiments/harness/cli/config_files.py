"""Configurations from files and words: JSON and TOML, options, dotted names."""

import contextlib
import dataclasses
import functools
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxformer.config import from_plain, plain, to_plain
from jaxformer.errors import ConfigError
from jaxformer.storage import to_path

T = TypeVar("T")


def split_step(name: str) -> tuple[Path, str]:
    """The folder and what follows the "@" in RUN@STEP; a folder with an "@" is taken whole."""
    path, at, step = name.rpartition("@")
    whole = to_path(name)
    return (to_path(path), step) if at and not whole.is_dir() else (whole, "")


def from_words(kind: Any, words: Sequence[str], where: str) -> Any:
    """The value of the type `kind` that the words after the option `where` stand for.

    Numbers, true, false and None are themselves where `kind` allows them, else text. Raises
    `ConfigError` for words that do not fit.
    """
    for values in ([*map(_literal, words)], list(words)):
        readings: list[Any] = [values]
        if len(values) == 1:
            readings += values
        for value in readings:
            with contextlib.suppress(ConfigError):
                return from_plain(kind, value, where)
    given = json.dumps(" ".join(words), ensure_ascii=False)
    raise ConfigError(f"{where} is {given}, but must be {plain.shown(kind)}")


def _literal(word: str) -> Any:
    """The number, the truth value or the None that `word` spells, else `word`."""
    if word == "None":
        return None
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON or TOML file, or in the config.json of a run's folder.

    Raises `ConfigError` for a path that does not exist, and for a file of another format.
    """
    path = path / "config.json" if path.is_dir() else path
    if path.suffix not in (".json", ".toml"):
        raise ConfigError(f"{path} is neither a .json nor a .toml file, nor the folder of a run")
    try:
        text = path.read_text(encoding="utf-8-sig")
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
        return from_plain(type(config), _merged(to_plain(config), fields))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def with_overrides(config: T, overrides: Mapping[str, Any]) -> T:
    """The dataclass `config` with other values of some fields, given by their dotted names.

    Raises `ConfigError` for a value that does not fit, or that the weights to start from decide.
    """
    kinds = settings(config)
    nested: dict[str, Any] = {}
    for name in sorted(overrides):  # the name of a part before its fields
        *groups, last = name.split(".")
        inner = nested
        for word in groups:
            if isinstance(inner.get(word), str):
                inner[word] = {"type": inner[word]}
            inner = inner.setdefault(word, {})
        inner[last] = to_plain(overrides[name], kinds.get(name))
    changed = from_plain(type(config), _merged(to_plain(config), nested))
    _refuse_what_a_parent_decides(changed, overrides)
    return changed


def _refuse_what_a_parent_decides(config: Any, given: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a given option that the run or folder to start from sets otherwise.

    Sizes, parts and tokenizer come with its weights. A default in `config.from_start` stands for
    its setting, so it is refused, too.
    """
    start = getattr(config, "init_from", "")
    defaults = _defaults_from_start(config) if start else {}
    for name, value in defaults.items():
        if name in given:
            raise ConfigError(
                f"{name}={value!r} is the default, with which a run has what {start} says: leave "
                "the option out, or give another value"
            )
    parent = start or getattr(config, "continue_from", "")
    folder = split_step(parent)[0]
    names = [name for name in given if name.startswith("model.") or name == "data.tokenizer"]
    if not (parent and names and folder.is_dir()):
        return
    from jaxformer.pretrained.model_specs import TRAINING_ONLY  # nothing else needs it

    ours = flat(to_plain(config))
    theirs = flat(read_object(folder))
    for name in names:
        keys = [key for key in ours if key == name or key.startswith(f"{name}.")]
        wrong = [key for key in keys if ours[key] != theirs.get(key)]
        if wrong and name.removeprefix("model.") not in TRAINING_ONLY:
            there = theirs.get(wrong[0], "another value")
            raise ConfigError(
                f"{wrong[0]} is {ours[wrong[0]]} here, but {there} in {folder}, whose "
                "weights this run starts from: leave the option out"
            )


def _defaults_from_start(config: Any) -> dict[str, Any]:
    """The settings of `config.from_start` that are their defaults, by their dotted names."""
    defaults: dict[str, Any] = {}
    for name in config.from_start:
        *groups, last = name.split(".")
        owner = functools.reduce(getattr, groups, config)
        value: Any = getattr(owner, last)
        is_part = dataclasses.is_dataclass(value)
        if is_part:
            usual = vars(type(value)())
            fields = vars(value).items()
            defaults |= {f"{name}.{field}": x for field, x in fields if x == usual[field]}
        elif value == getattr(type(owner), last):
            defaults[name] = value
    return defaults


def settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """The type of each setting of the dataclass `config`, by its dotted name.

    A part is a setting, and so are the fields of all parts that may stand there. Of a class
    `config` the parts of your own that it holds are not known.
    """
    kinds: dict[str, Any] = {}
    hints = plain.type_hints(config if isinstance(config, type) else type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        kind, value = hints[name], getattr(config, name, None)
        parts: list[Any] = [*plain.part_kinds(kind).values()]
        if parts:
            kinds[prefix + name] = kind
        elif plain.is_dataclass(kind):
            parts = [kind]
        else:
            kinds[prefix + name] = kind
        if plain.is_dataclass(type(value)):
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
