"""The text of --help: the options people use, or all of some groups."""

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import re
import shutil
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from experiments.harness.cli.config_files import has_setting, part_kinds, part_name
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError

RUN = "run"
"""The group of the options that belong to no other."""


def of(config: Any, kinds: Mapping[str, Any], topics: Sequence[str]) -> str:
    """The help of the options `kinds` of `config`: of the groups `topics`, of "all", or in short.

    In short it shows the options that the class of `config` names in `common_options`, and those
    of its subclass; without such names all. Raises `ConfigError` for an unknown group.
    """
    common = list(getattr(config, "common_options", ()))
    if not topics and common:
        declaring = next(k for k in type(config).__mro__ if "common_options" in vars(k))
        inherited = {field.name for field in dataclasses.fields(declaring)}
        added = [name for name in kinds if name.partition(".")[0] not in inherited]
        return _short(config, kinds, [*added, *common])
    groups = _groups(kinds)
    for topic in topics:
        if topic not in (*groups, "all"):
            raise ConfigError(
                f"--help {topic}: there is no such group: give all or one of {', '.join(groups)}"
            )
    chosen = [*groups] if not topics or "all" in topics else topics
    parts = [name for name, kind in kinds.items() if part_kinds(kind) and _group(name) in chosen]
    told = [_part(config, kinds[name], name) for name in parts if has_setting(config, name)]
    drawn = [box for group, box in _boxes(config) if _group(f"{group}.") in chosen]
    return "".join([*told, *drawn])


def wrapped(text: str, indent: str = "") -> str:
    """`text` in the width of the terminal, at most 100 columns."""
    return textwrap.fill(text, _width(), subsequent_indent=indent) + "\n"


@cache
def field_docs(kind: Any) -> dict[str, str]:
    """The docstring under each field of the dataclass `kind`, on one line."""
    docs: dict[str, str] = {}
    base: Any
    for base in reversed([each for each in kind.__mro__ if dataclasses.is_dataclass(each)]):
        with contextlib.suppress(OSError, TypeError):  # a class made by a function has no source
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, doc in pairwise(body.body):  # type: ignore[attr-defined]
                if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr):
                    docs[ast.unparse(field.target)] = " ".join(ast.literal_eval(doc.value).split())
    return docs


def doc_of(config: Any, name: str) -> str:
    """The docstring of the field of `config` with the dotted `name`."""
    *path, field = name.split(".")
    for word in path:
        config = getattr(config, word)
    kind: Any = type(config)
    return field_docs(kind).get(field, "")


def _short(config: Any, kinds: Mapping[str, Any], names: Sequence[str]) -> str:
    names = [name for name in names if name in kinds]
    first, second = max(map(len, names)) + 2, 13
    room = _width() - first - second - 4
    text = f"{'option':{first}}  {'default':{second}}\n"
    for name in names:
        value = _shortened(_value(config, kinds[name], name), second)
        text += f"--{name:{first - 2}}  {value:{second}}  "
        text += f"{_shortened(doc_of(config, name).partition('. ')[0].removesuffix('.'), room)}\n"
    counts = ", ".join(f"{group} ({count})" for group, count in _groups(kinds).items())
    more = f"--help GROUP shows all options of a group: {counts}. --help all shows all of them."
    return f"{text}\n{wrapped(more)}"


def _shortened(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder=" ...")


def _value(config: Any, kind: Any, name: str) -> str:
    """The default of the option `name`, as it would be typed."""
    for word in name.split("."):
        config = getattr(config, word)
    if dataclasses.is_dataclass(config):
        return part_name(config, kind)
    return " ".join(map(str, config)) if isinstance(config, tuple | list) else str(config)


def _groups(kinds: Mapping[str, Any]) -> dict[str, int]:
    """The number of options of each group."""
    groups = [_group(name) for name in kinds]
    return {group: groups.count(group) for group in groups}


def _group(name: str) -> str:
    group, dot, _ = name.partition(".")
    return group if dot and group else RUN


def _part(config: Any, kind: Any, name: str) -> str:
    chosen = f"{doc_of(config, name)} (default: {_value(config, kind, name)}; give it to see the "
    chosen += "options of another)"
    return wrapped(f"--{name} {{{','.join(part_kinds(kind))}}}  {chosen}", "      ")


def _boxes(config: Any) -> list[tuple[str, str]]:
    """The frame that tyro draws around each group of options, with the dotted name of the group."""
    tyro = optional_dependencies.load("tyro")
    drawn = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # without it there are no frames
    os.environ["COLUMNS"] = str(_width())  # in a wider terminal frames stand side by side
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(drawn))
        stack.enter_context(contextlib.suppress(SystemExit))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # a part of your own is none of those it expects
        options = (tyro.conf.AvoidSubcommands,)
        tyro.cli(type(config), default=config, args=["-h"], use_underscores=True, config=options)
    drawn.seek(0)
    boxes = re.split(r"(?m)^(?=╭─ )", drawn.read())[1:]
    titles = [re.match(r"╭─ (?:([\w.]+) )?options", box) for box in boxes]
    return [((title and title[1]) or "", box) for title, box in zip(titles, boxes, strict=True)]


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100)
