"""Runs are listed with what they reached, and the settings of two are compared."""

import json

import pytest

from experiments import runs
from jaxformer.errors import ConfigError, DataError
from tests.faults import states


@pytest.fixture
def folder(tmp_path):
    done = tmp_path / "runs" / "translation" / "done"
    states.make_folder(done / "checkpoints", (300, 1_800))
    begun = tmp_path / "runs" / "language_modelling" / "begun"
    begun.mkdir(parents=True)
    for run, start in ((done, "2026-11-22T10:31:05+00:00"), (begun, "2026-11-23T01:02:03+00:00")):
        (run / "env.json").write_text(json.dumps({"time": start, "earlier": []}))
    (done / "config.json").write_text(json.dumps({"optimizer": {"total_steps": 1_800, "b2": 0.9}}))
    settings = {"optimizer": {"total_steps": 5}, "init_from": "gpt2", "name": "begun"}
    (begun / "config.json").write_text(json.dumps(settings))
    (done / "scores.json").write_text('{"text": "test", "bleu": 39.5416, "chrf": 63.1, "loss": 1}')
    lines = [{"step": 2, "validation_loss": 3.5}, {"step": 3, "loss": 3.0}]
    (begun / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "runs"


def test_each_run_has_a_line_with_step_score_date_and_parent(folder, capsys):
    runs.main([str(folder)])
    head, begun, done = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    head, begun, done = ([word.strip() for word in line if word] for line in (head, begun, done))
    assert head == ["run", "step", "score", "started", "parent"]
    assert begun[0].endswith("language_modelling/begun") and done[0].endswith("translation/done")
    assert begun[1:5] == ["0 of 5", "validation_loss 3.500", "2026-11-23 01:02", "gpt2"]
    assert done[1:3] == ["1,800 of 1,800", "test bleu 39.542, test chrf 63.100"]
    assert done[4] == "-"


def test_a_run_that_is_damaged_is_listed_with_what_can_be_read(folder, capsys):
    for path in folder.rglob("config.json"):
        path.write_text("{")
    for path in folder.rglob("scores.json"):
        path.write_text("[1]")
    runs.main(["list", str(folder)])
    assert capsys.readouterr().out.count("\n") == 3


def test_the_settings_that_differ_are_named_with_both_values(folder, capsys):
    done, begun = folder / "translation" / "done", folder / "language_modelling" / "begun"
    runs.main(["diff", str(done), str(begun)])
    assert capsys.readouterr().out.splitlines() == [
        'init_from: absent -> "gpt2"',
        'name: absent -> "begun"',
        "optimizer.b2: 0.9 -> absent",
        "optimizer.total_steps: 1800 -> 5",
    ]
    runs.main(["diff", str(done), str(done / "config.json")])
    assert capsys.readouterr().out == "the settings are equal\n"


@pytest.mark.parametrize("word", runs.COMMANDS)
def test_a_word_is_in_the_help_and_its_own_help_fits_a_screen(word, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    runs.main(["--help"])
    assert f"\n  {word}  " in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        runs.main([word, "--help"])
    assert end.value.code == 0 and len(capsys.readouterr().out.splitlines()) <= 60


@pytest.mark.parametrize(
    "words, error, message",
    [
        (["list", "{}"], DataError, "there is no run in .*: train first"),
        (["lits"], ConfigError, "'lits' is neither a folder nor one of list, compare"),
        (["diff", "a"], ConfigError, "1 runs were given: give the folders of two"),
        (["page", "a", "b"], ConfigError, "a is not the folder of a run: it has no config.json"),
        (["plot"], ConfigError, "no runs were given"),
    ],
)
def test_runs_that_are_missing_are_asked_for(words, error, message, tmp_path):
    with pytest.raises(error, match=message):
        runs.main([word.format(tmp_path) for word in words])
