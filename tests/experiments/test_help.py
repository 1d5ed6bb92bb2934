"""Every option of every command says in `--help` what it is."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

from experiments.harness import cli
from experiments.harness.cli import config_files, help_text
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "experiments").rglob("*.py")
    if re.search(r"^    (cli\.start\(|sys\.exit\(cli)", path.read_text(encoding="utf-8"), re.M)
)


class Parsed(Exception):
    """Carries what a command gave to `cli.parse`."""


def presets_of(command, monkeypatch):
    """The presets that `command` gives to `cli.parse`."""

    def parse(presets, args=None, description="", **_):
        raise Parsed(presets)

    def start(main, presets, *_, **__):
        parse(presets)

    module = importlib.import_module(command)
    main = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body[-1]
    block = compile(ast.Module(main.body, type_ignores=[]), module.__file__, "exec")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [command])
        patch.setattr(cli, "run", lambda main: main())
        patch.setattr(cli, "parse", parse)
        patch.setattr(cli, "start", start)
        with pytest.raises(Parsed) as parsed:
            exec(block, vars(module))
    return parsed.value.args[0]


# The commands that import a package which only the peers' environment has.
OF_PEERS = {"experiments.examples.lm_eval_adapter"}


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[pytest.mark.peer] * (name in OF_PEERS)) for name in COMMANDS],
)
def test_every_option_of_a_command_has_a_sentence(command, monkeypatch):
    config = next(iter(presets_of(command, monkeypatch).values()))
    known = [x for x in config_files.settings(config) if config_files.has_setting(config, x)]
    said = {name: help_text.doc_of(config, name) for name in known}
    assert said
    assert not [name for name, doc in said.items() if not re.fullmatch(r"\S+ .*\.", doc)]


@pytest.mark.parametrize("presets", [LANGUAGE_PRESETS, TRANSLATION_PRESETS])
def test_the_help_of_a_training_is_one_screen_and_all_of_it_has_every_option(
    presets, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    said = []
    for words in ("--help", "--help all"):
        with pytest.raises(SystemExit):
            cli.parse(presets, words.split(), "Trains.", experiment="x")
        said.append(capsys.readouterr().out)
    for text in said:
        assert max(map(len, text.splitlines())) <= 80
    short, whole = said
    config = next(iter(presets.values()))
    assert len(short.splitlines()) <= 45
    table = short.partition("\noption")[2].partition("\n\n")[0]
    assert [f"--{name}" for name in config.common_options] == re.findall(r"\n(--[\w.]+)", table)
    known = config_files.settings(config)
    held = {f"--{name}" for name in known if config_files.has_setting(config, name)}
    assert held <= set(re.findall(r"--[\w.]+", whole))
    for group in ("run", *{name.partition(".")[0] for name in known if "." in name}):
        assert re.search(rf"\b{group} \(\d+\)", short)
