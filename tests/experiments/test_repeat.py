"""A reported number is trained again by its own command and compared within its interval."""

import dataclasses
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

from experiments import repeat, results
from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.repeat import RepeatOptions, main
from experiments.results import Result
from experiments.sweep import open_cells, presets_of
from jaxformer.config import to_plain
from jaxformer.errors import ConfigError, DataError
from tests.experiments.finished_runs import sentences, worse, write_run

pytestmark = pytest.mark.long

TEXT = sentences(29, seed=1)
TRAIN = "python -m my.train --data.note 'two words' --name toy --training.seed 9"
LINE = Result(
    table="own", system="toy", metric="exact", score=0.7, command=TRAIN, date="2026-11-22"
)
SEVERAL = dataclasses.replace(LINE, seeds=[3, 4, 5], scores=[0.68, 0.7, 0.72])
ONE = dataclasses.replace(LINE, seeds=[3], interval=0.05)
WORDS = "translation", "own", "toy", "exact"


def option(words, name):
    return words[len(words) - words[::-1].index(name)]


@pytest.fixture
def line(tmp_path, monkeypatch):
    """A function that makes `line` the only one; the commands that it is repeated by are listed."""

    def write(line, changed=0.0, printed=""):
        """A repeated run replaces a share `changed` of the words of its sentences."""
        monkeypatch.setattr(results, "ROOT", tmp_path)
        (tmp_path / "translation").mkdir(exist_ok=True)
        path = tmp_path / "translation" / results.FILE
        path.unlink(missing_ok=True)
        results.append(path, [line])
        commands = []

        def run(command, **options):
            commands.append(command[2:])
            if "--runs" in command:
                seed = int(command[-1])
                folder = Path(option(command, "--runs"), "translation", f"run{seed}")
                write_run(folder, worse(TEXT, changed, seed), TEXT, seed=seed)
            return subprocess.CompletedProcess(command, 0, stdout=printed)

        monkeypatch.setattr(repeat.subprocess, "run", run)
        return commands

    return write


def test_each_seed_is_trained_by_the_command_in_a_folder_of_its_own(line, tmp_path, capsys):
    commands = line(dataclasses.replace(SEVERAL, score=0.999, scores=[0.998, 0.999, 1.0]))
    main(RepeatOptions(WORDS, seeds=2, runs=str(tmp_path / "again")))
    assert commands == [
        ["my.train", "--data.note", "two words", "--name", "toy", "--training.seed", "9", "--runs"]
        + [str(tmp_path / "again" / "unknown"), "--name", f"seed{seed}"]
        + ["--training.seed", str(seed)]
        for seed in (3, 4)
    ]
    shown = capsys.readouterr().out
    assert "line      0.999, seeds 3 4 5, 2026-11-22, ? s a seed" in shown
    assert "repeated  1.0, seeds 3 4, " in shown and "the settings have changed since" in shown
    # Student's t of 2 degrees of freedom, 4.303, times 0.001 times the root of 1/3 + 1/2
    half = "±0.004 is the 95 % prediction interval from its 3 seeds."
    assert f"They agree: the difference is +0.001, and {half}" in shown


@pytest.mark.parametrize("known, interval", [(SEVERAL, "from its 3 seeds"), (ONE, "test items")])
def test_a_score_outside_the_interval_ends_with_code_1(known, interval, line, tmp_path, capsys):
    line(known, changed=1.0)
    with pytest.raises(SystemExit) as ended:
        main(RepeatOptions(WORDS, runs=str(tmp_path)))
    assert ended.value.code == 1
    shown = capsys.readouterr().out
    assert "They differ: the difference is -0.7" in shown and interval in shown


def test_the_interval_is_that_of_the_seeds_else_of_the_items_else_of_the_digits():
    half, _ = repeat.allowed(SEVERAL, 1)
    assert np.isclose(half, 4.302653 * 0.02 * np.sqrt(1 / 3 + 1))
    assert repeat.allowed(ONE, 1)[0] == 0.05
    assert repeat.allowed(dataclasses.replace(ONE, interval=None, score=97.2822), 1)[0] == 0.005


SWEEP = ["translation", "--name", "x", "--vary", "model.d_model=24,32"]


def test_of_a_sweep_the_cells_with_the_settings_of_the_line_are_trained(line, tmp_path):
    runs = str(tmp_path / "again")
    options = [*SWEEP, "--seeds", "2", "--runs", runs]
    cells = open_cells(cli.parse(presets_of("translation"), options, positional="experiment")).cells
    wide = config_files.flat(to_plain(list(cells.values())[2]))
    command = shlex.join(["python", "-m", "experiments.sweep", *SWEEP, "--seeds", "2"])
    known = dataclasses.replace(
        ONE, command=command, seeds=[0, 1], config_sha256=results.settings_digest(wide)
    )
    commands = line(dataclasses.replace(known, score=1.0))
    main(RepeatOptions(WORDS, runs=runs))
    assert [command[-2:] for command in commands] == [["--cell", "2"], ["--cell", "3"]]
    line(dataclasses.replace(known, config_sha256="0" * 64))
    with pytest.raises(ConfigError, match="has no cell with the settings of the line any more"):
        main(RepeatOptions(WORDS, runs=runs))
    alone = shlex.join(["python", "-m", "experiments.sweep", *SWEEP[:3], "--seeds", "2"])
    changed = dataclasses.replace(known, command=alone, config_sha256="1" * 64, score=1.0)
    commands = line(changed)  # its only variant, whatever settings were added since
    main(RepeatOptions(WORDS, seeds=1, runs=runs))
    assert [command[-2:] for command in commands] == [["--cell", "0"]]


def test_an_evaluation_is_read_from_the_last_line_that_it_prints(line, tmp_path, capsys):
    command = f"python -m my.evaluate --run {tmp_path}"
    known = dataclasses.replace(ONE, command=command)
    assert line(known, printed='exact 0.71\n{"exact": 0.71}\n') == []
    main(RepeatOptions(WORDS))
    assert "repeated  0.71, seeds 3" in capsys.readouterr().out
    line(known, printed="exact 0.71\n")
    with pytest.raises(DataError, match="has no exact: 'exact 0.71'"):
        main(RepeatOptions(WORDS))


def test_scores_of_another_text_are_not_compared(line, tmp_path):
    line(dataclasses.replace(ONE, text_sha256="0" * 64))
    with pytest.raises(DataError, match="scores of different texts cannot be compared"):
        main(RepeatOptions(WORDS, runs=str(tmp_path)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seeds": []}, "it is of no training: it was compiled, counted or timed"),
        ({"command": None}, "no command trains and scores no run"),
        ({"command": "GPT-3's table 2.1"}, "no command trains and scores no run"),
        ({"command": "python -m my.finetune"}, "my.finetune trains and scores no run"),
        ({"device": "tpu:TPU v5e"}, "it needs a device of the kind tpu:TPU v5e"),
        ({"command": "python -m my.evaluate --run gone"}, "the run gone, which is not here: train"),
    ],
)
def test_what_cannot_be_repeated_here_is_refused_with_the_reason(changes, reason, line, capsys):
    commands = line(dataclasses.replace(ONE, **changes))
    with pytest.raises(ConfigError, match=reason):
        main(RepeatOptions(WORDS))
    with pytest.raises(ConfigError, match="nothing names no line: give experiment, table, system"):
        main(RepeatOptions())
    assert capsys.readouterr().out == "" and commands == []


def test_words_that_name_no_line_list_those_that_can_be_repeated(line, capsys):
    line(ONE)
    for words in ((), WORDS[:2], (*WORDS[:3], "bleu")):
        with pytest.raises(ConfigError, match="names no line"):
            main(RepeatOptions(words))
        assert capsys.readouterr().out == "translation own toy exact\n"


def test_a_command_that_fails_ends_with_its_code(line, monkeypatch, tmp_path):
    line(ONE)
    failed = subprocess.CompletedProcess([], 3)
    monkeypatch.setattr(repeat.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(SystemExit) as ended:
        main(RepeatOptions(WORDS, runs=str(tmp_path)))
    assert ended.value.code == 3
