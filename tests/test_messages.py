"""Options that messages of the code name are options of a command."""

import ast
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import plan, runs, sweep
from experiments.harness import cli
from experiments.harness.cli.config_files import settings
from experiments.language_modelling import generate
from tests.documents import ROOT

PACKAGES = (ROOT / "experiments", ROOT / "jaxformer")
EXAMPLES = ROOT / "experiments" / "examples"  # have parsers of their own
SOURCES = sorted(
    path for package in PACKAGES for path in package.rglob("*.py") if EXAMPLES not in path.parents
)
OPTION = re.compile(r"(?:^|(?<=[\s('\"=`]))--([a-z][\w.]*\w)")
FOR_ALL = {"preset", "config", "resume", "continue_from", "help", "trust_code"}
GIT = {"porcelain", "show", "untracked"}
STYLES = {"c0", "cX", "line", "soft"}  # variables of CSS
SACREBLEU = {"paired"}


def commands() -> Iterator[str]:
    """The modules that start a command with options of `cli`."""
    for path in SOURCES:
        if "cli.start(" in path.read_text() and "def start(" not in path.read_text():
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def offered(module: str) -> set[str]:
    """The names of the options of a command."""
    started: list[Any] = []

    def start(main: Any, presets: Any, *_: Any, **__: Any) -> None:
        started.extend(presets.values())
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setattr(cli, "start", start)
        with pytest.raises(KeyboardInterrupt):
            runpy.run_module(module, run_name="__main__")
    return {name for preset in started for name in settings(preset)}


def known_options() -> set[str]:
    """Options of all commands, the groups that they are in, and the flags that switch them off."""
    names = FOR_ALL | {name for module in commands() for name in offered(module)}
    for options in (sweep.SweepOptions, plan.PlanOptions, generate.GenerateOptions):
        names |= set(settings(options()))
    for command in runs.COMMANDS.values():
        names |= set(settings(runs.get_type_hints(command)["options"]()))
    groups = {name.rpartition(".")[0] for name in names}
    off = {re.sub(r"(^|\.)(\w+)$", r"\1no_\2", name) for name in names}
    return names | groups | off


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the text of each string of a file; parts of one message are joined."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [x.value if isinstance(x, ast.Constant) else "X" for x in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def named_options(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the name of each option in the strings of a file."""
    for line, text in texts(path):
        for name in OPTION.findall(text):
            yield line, name


def test_an_option_that_a_message_names_exists():
    known = known_options()
    wrong = [
        f"{path.relative_to(ROOT)}:{line} --{name}"
        for path in SOURCES
        for line, name in named_options(path)
        if name not in known | GIT | STYLES | SACREBLEU and not name.startswith("xla_")
    ]
    assert wrong == []


def test_an_option_that_no_command_has_is_found(tmp_path):
    path = tmp_path / "messages.py"
    path.write_text('raise ValueError(f"{x} is short: "\n                 "give --train FILE")\n')
    assert {*named_options(path)} == {(1, "train")} and "train" not in known_options()
