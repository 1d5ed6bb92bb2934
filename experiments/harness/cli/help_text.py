"""The text of --help, and the option to write instead of one that does not exist."""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

from experiments.harness.cli.config_files import has_setting
from jaxformer.config.plain import part_kinds, part_name, shown
from jaxformer.errors import ConfigError

_OTHER_NAMES = {
    "batch_size": ("batch_tokens",),
    "bf16": ("dtype",),
    "block_size": ("seq_len",),
    "epochs": ("total_steps",),
    "hidden_size": ("d_model",),
    "lr": ("learning_rate",),
    "max_tokens": ("batch_tokens", "max_new_tokens"),
    "model_name_or_path": ("run", "init_from"),
    "output_dir": ("runs", "output"),
    "wd": ("weight_decay",),
}
"""Other programs' name of an option -> the last words of the options here."""


def of(config: Any, kinds: Mapping[str, Any], topics: Sequence[str]) -> str:
    """The help of the options `kinds` of `config`: of the groups `topics`, of "all", or in short.

    In short it shows the options that the class of `config` names in `common_options`, and those
    of its subclass; without such names all. Those in its `rare_options` are the last of their
    group. Raises `ConfigError` for an unknown group.
    """
    rare_options = getattr(config, "rare_options", ())
    ordered = [name for name in kinds if name not in rare_options]
    ordered += [name for name in kinds if name in rare_options]
    kinds = {name: kinds[name] for name in ordered}
    groups = Counter(map(_group, kinds))
    if not topics and hasattr(config, "common_options"):
        return _short(config, kinds, groups)
    for topic in topics:
        if topic not in (*groups, "all"):
            raise ConfigError(
                f"--help {topic}: there is no such group: give all or one of {', '.join(groups)}"
            )
    chosen = topics
    if not topics or "all" in topics:
        chosen = list(groups)
    text = ""
    for group in chosen:
        names = [name for name in kinds if _group(name) == group and has_setting(config, name)]
        if names:
            entries = "".join(_entry(config, kinds[name], name) for name in names)
            text += f"{group}\n{entries}\n"
    return text.removesuffix("\n")


def about(description: str, presets: Mapping[str, Any], chosen: str, experiment: str) -> str:
    """The description of a command, and of the options that are no settings."""
    text = ""
    if len(presets) > 1:
        text += f"--preset NAME chooses the defaults: {', '.join(presets)}. Those shown are of "
        text += f"{chosen}. "
    text += "--config PATH takes settings from a .json or .toml file or a run's folder; options "
    text += "come on top."
    if experiment:
        text += " --resume RUN goes on with the run in the folder RUN, --continue_from RUN with a "
        text += "new run from its state."
    text += " --trust_code lets files and folders name Python code of their authors, which runs."
    paragraphs = [each for each in inspect.cleandoc(description).split("\n\n") if each]
    return "\n".join(map(_wrapped, [*paragraphs, text]))


@cache
def _field_docs(kind: Any) -> dict[str, str]:
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
    owner, dot, field = name.rpartition(".")
    kind: Any = type(attrgetter(owner)(config) if dot else config)
    return _field_docs(kind).get(field, "")


def _short(config: Any, kinds: Mapping[str, Any], groups: Mapping[str, int]) -> str:
    """A line for each common option, and the number of options of each of the `groups`."""
    declaring = next(k for k in type(config).__mro__ if "common_options" in vars(k))
    inherited = {field.name for field in dataclasses.fields(declaring)}
    names = [name for name in kinds if name.partition(".")[0] not in inherited]
    names += [name for name in config.common_options if name in kinds]
    name_width = max(map(len, names)) + len("--")
    value_width = 13
    text = f"{'option':{name_width}}  {'default':{value_width}}\n"
    for name in names:
        value = _shortened(_value(config, kinds[name], name), value_width)
        sentence = doc_of(config, name).partition(". ")[0].removesuffix(".")
        text += f"{f'--{name}':{name_width}}  {value:{value_width}}  "
        text += f"{_shortened(sentence, _width() - name_width - value_width - 4)}\n"
    counts = ", ".join(f"{group} ({count})" for group, count in groups.items())
    more = f"--help GROUP shows all options of a group: {counts}. --help all shows all of them."
    return f"{text}\n{_wrapped(more)}"


def _entry(config: Any, kind: Any, name: str) -> str:
    """The option, its type, docstring and default."""
    parts = part_kinds(kind)
    more = ""
    if parts:
        allowed = "|".join(parts)
        more = "; give it to see the options of another"
    elif kind is bool:
        allowed = ""  # its name alone turns it on
    else:
        allowed = shown(kind)
    text = f"{doc_of(config, name)} (default: {_value(config, kind, name) or 'empty'}{more})"
    return _wrapped(f"--{name} {allowed}".strip()) + _wrapped(f"    {text}", "    ")


def _value(config: Any, kind: Any, name: str) -> str:
    """The default of the option `name`, as it would be typed."""
    value = attrgetter(name)(config)
    if dataclasses.is_dataclass(value):
        return part_name(value, kind)
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _group(name: str) -> str:
    """The group of an option; options without a group are in the group run."""
    return name.partition(".")[0] if "." in name else "run"


def _shortened(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder=" ...")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _width(), subsequent_indent=indent) + "\n"


def _width() -> int:
    """Columns of the terminal, at most 100."""
    return min(shutil.get_terminal_size().columns, 100)


def suggestion(name: str, known: Sequence[str]) -> str:
    """The option to write instead of the unknown one `name`; names are without hyphens."""
    group = [option for option in known if option.startswith(f"{name}.")]
    if group:
        return f"it is a group of options, such as --{group[0]}; --help {name} lists them"
    last_words = {option: option.rpartition(".")[2] for option in known}
    word = name.rpartition(".")[2]
    words = (word, *_OTHER_NAMES.get(word, ()))
    same = [f"--{option}" for option in known if last_words[option] in words]
    if same:
        return f"use {' or '.join(same[:3])}"
    near = [other for other in last_words.values() if len(word) > 2 and word in other]
    near += difflib.get_close_matches(word, last_words.values())
    options = []
    for other in dict.fromkeys(near):
        options += [f"--{option}" for option in known if last_words[option] == other]
    if not options:
        return "--help all lists them"
    return f"did you mean {' or '.join(options[:3])}? --help all lists them"
