"""A newcomer is answered: lists of commands, home folders, and the words of other programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import jaxformer as jf
from experiments import command_list
from experiments.harness import cli
from experiments.harness.runs import shares, source_kinds, sources
from experiments.harness.runs.records import read_fields
from experiments.harness.runs.text_cache import NOTHING_KEPT
from experiments.harness.runs.text_io import check_output
from experiments.harness.training.training_config import OptimizerConfig
from experiments.language_modelling.tasks.squad import read_questions
from experiments.translation.presets import PRESETS
from jaxformer.errors import ConfigError
from jaxformer.text.data import read_documents, read_lines

ROOT = Path(command_list.__file__).parent


@pytest.mark.parametrize("package", ["", ".translation", ".language_modelling", ".benchmarks"])
def test_a_folder_of_commands_lists_them(package):
    done = subprocess.run(
        [sys.executable, "-m", f"experiments{package}"], capture_output=True, text=True, timeout=60
    )
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    files = ROOT.joinpath(*package.split(".")[1:]).glob("*.py")
    commands = [x.stem for x in files if '\nif __name__ == "__main__":' in x.read_text()]
    assert done.returncode == 0 and commands
    assert {f"experiments{package}.{name}" for name in commands} <= set(listed)
    if package == "":
        assert {"experiments.translation.train", "experiments.examples.inside_flax"} <= set(listed)


def test_a_word_after_a_folder_names_the_command(monkeypatch, capsys):
    for word in ("train", "--train"):
        monkeypatch.setattr(sys, "argv", ["x", word])
        with pytest.raises(SystemExit) as end:
            command_list.show("experiments.translation")
        assert end.value.code == 2
        assert "python -m experiments.translation.train" in capsys.readouterr().err


def test_each_command_of_the_list_says_what_it_does():
    for name, about in command_list.commands_of("experiments").items():
        assert 3 < len(about) < 60 and "`" not in about, name


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("runs/translation/grammar", "experiments.translation.train"),
        ("runs/language_modelling/python_stdlib", "experiments.language_modelling.train"),
    ],
)
def test_a_run_that_is_not_there_yet_is_answered_with_its_command(
    folder, command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{folder} .* python -m {command}$"):
        jf.load(folder)


@pytest.mark.parametrize("make", [jf.OptimizerConfig, OptimizerConfig])
def test_adamw_is_answered_with_adam(make):
    for name in ("adamw", "AdamW"):
        with pytest.raises(ConfigError, match="name='adam' and a weight_decay"):
            make(name=name)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder with a text, records and questions."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("One.\nTwo.\n")
    (tmp_path / "a.jsonl").write_text('{"text": "One."}\n')
    question = {"id": "1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}]}
    article = {"paragraphs": [{"context": "Ann ran.", "qas": [question]}]}
    (tmp_path / "b=1").write_text("One.\n")
    (tmp_path / "squad.json").write_text(json.dumps({"data": [article]}))
    return tmp_path


def test_a_path_that_begins_with_the_home_folder_is_found_by_every_reader(home):
    assert read_lines("~/a.txt") == list(sources.read_texts("~/a.txt", "text")) == ["One.", "Two."]
    assert ["".join(x) for x in read_documents(["~/a.txt"], split="line")] == ["One.", "Two."]
    assert list(read_fields("~/a.jsonl", ["text"])) == [("One.",)]
    assert sources.identity("~/a.txt", NOTHING_KEPT).startswith("text ")
    assert source_kinds.kind_of("~/a.jsonl") == "json lines"
    assert shares.share_of("~/b=1") == ("~/b=1", None)
    assert [x.question for x in read_questions("~/squad.json")] == ["Who?"]
    with pytest.raises(ConfigError, match="~/a.txt"):
        check_output("~/a.txt", str(home / "a.txt"))


def test_an_option_with_an_equals_sign_has_the_home_folder_too(home):
    words = ["--runs=~/runs", "--data.train.source=~/a.txt", "--data.train.target", "~/a.txt"]
    config = cli.parse(PRESETS, words)
    assert config.runs == f"{home}/runs" and config.data.train.source == f"{home}/a.txt"
