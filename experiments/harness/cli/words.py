"""The words of a command line: grouped by the option before them, and read as its value."""

import os
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.cli import config_files
from jaxformer.config import plain
from jaxformer.config.checks import alternatives
from jaxformer.errors import ConfigError

Groups = dict[str, list[list[str]]]
"""The words after each use of an option, by its name without hyphens."""


def group(args: Sequence[str], positional: str = "") -> Groups:
    """The words `args` by their options, the last used option last.

    Words before the first option belong to the option `positional`.
    """
    groups: Groups = {}
    words: list[str] | None = None
    for arg in args:
        name, equals, value = arg.partition("=")
        if name.startswith("--") or arg == "-h":
            name = "help" if arg == "-h" else name.removeprefix("--").replace("-", "_")
            words = [_with_home(value)] if equals else []
            groups[name] = [*groups.pop(name, []), words]
        elif words is not None:
            words.append(arg)
        elif positional:
            words = [arg]
            groups[positional] = [words]
        else:
            raise ConfigError(f"{arg!r} is no option: the name of an option begins with --")
    return groups


def _with_home(value: str) -> str:
    """`value` with the home folder for a first "~": a shell does so in `--run ~/a` alone."""
    return os.path.expanduser(value) if value.startswith("~/") else value


def take(kinds: Mapping[str, Any], groups: Groups, positional: str = "") -> dict[str, Any]:
    """Removes the options `kinds` from `groups`: their values, by the names of their fields.

    Words behind an option that does not take them belong to the option `positional`.
    """
    flags = {name: name for name, kind in kinds.items() if kind is bool}
    flags |= {_off(name): name for name in flags}
    values: dict[str, Any] = {}
    for name in [*(name for name in groups if name != positional), positional]:
        if name not in groups or name not in (*kinds, *flags):
            continue
        uses = groups.pop(name)
        is_list = name in kinds and _is_list(kinds[name])
        if positional and not is_list and name != positional:
            count = 0 if name in flags else 1
            later_words = [word for words in uses for word in words[count:]]
            uses = [words[:count] for words in uses]
            if later_words:
                groups.setdefault(positional, []).append(later_words)
        if name in flags:
            field = flags[name]
            if uses[-1]:
                raise ConfigError(
                    f"--{name} is a flag and takes no value: write --{field} or --{_off(field)} "
                    "alone"
                )
            values[field] = name == field
        elif is_list:
            values[name] = read(kinds[name], [word for use in uses for word in use], f"--{name}")
        else:
            values[name] = read(kinds[name], uses[-1], f"--{name}")
    return values


def read(kind: Any, words: Sequence[str], where: str) -> Any:
    """The value of the type `kind` that the words after the option `where` stand for."""
    if not _is_list(kind) and len(words) != 1:
        raise ConfigError(f"{where} takes one value, but {len(words)} were given")
    return words[0] if plain.part_kinds(kind) else config_files.from_words(kind, words, where)


def _off(name: str) -> str:
    """The flag that switches off the flag `name`."""
    group, dot, last = name.rpartition(".")
    return f"{group}{dot}no_{last}"


def _is_list(kind: Any) -> bool:
    return any(typing.get_origin(each) in (tuple, list) for each in alternatives(kind))
