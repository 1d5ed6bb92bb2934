"""Every option of every command says in `--help` what it is."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

from experiments.harness import cli

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "experiments").rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
)


class Parsed(Exception):
    """Carries what a command gave to `cli.parse`."""


def presets_of(command, monkeypatch):
    """The presets and the description that `command` gives to `cli.parse`."""

    def parse(presets, args=None, description="", **_):
        raise Parsed(presets, description)

    module = importlib.import_module(command)
    main = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body[-1]
    block = compile(ast.Module(main.body, type_ignores=[]), module.__file__, "exec")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [command])
        patch.setattr(cli, "run", lambda main: main())
        patch.setattr(cli, "parse", parse)
        with pytest.raises(Parsed) as parsed:
            exec(block, vars(module))
    return parsed.value.args


def help_of(presets, description, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        cli.parse(presets, ["--help"], description)
    assert end.value.code == 0
    return capsys.readouterr().out


def options_in(text):
    """Each option of a help text, with all that is said of it on one line."""
    lines = [line.strip("│| ") for line in text.partition("usage:")[2].splitlines()[1:]]
    lines = [line for line in lines if "--help" not in line and "show this help" not in line]
    entries = " ".join(line if line.startswith("-") else f" {line}" for line in lines)
    found = re.findall(r"(?<= )(--[\w.]+) (.*?\(default: .*?\)) ", entries + " ")
    return {name: " ".join(said.split()) for name, said in found}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_has_a_sentence(command, capsys, monkeypatch):
    presets, description = presets_of(command, monkeypatch)
    said = options_in(help_of(presets, description, capsys, monkeypatch))
    assert said
    silent = [
        name for name, text in said.items() if not re.search(r"[A-Z0-9`].*\. \(default", text)
    ]
    assert not silent


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_into_80_columns(command, capsys, monkeypatch):
    text = help_of(*presets_of(command, monkeypatch), capsys, monkeypatch)
    assert max(len(line) for line in text.splitlines() if not line.startswith("usage:")) <= 80
