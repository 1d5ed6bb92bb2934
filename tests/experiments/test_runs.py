"""Runs are listed with what they reached, and the settings of two are compared."""

import json

import pytest

from experiments import diff, runs
from experiments.harness import cli
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


def test_each_run_has_a_line_with_step_score_date_parent_and_size(folder, capsys):
    runs.main(runs.RunsOptions((str(folder),)))
    head, begun, done = (line.split("  ") for line in capsys.readouterr().out.splitlines())
    assert [word.strip() for word in head if word] == [*runs.Row._fields]
    begun, done = ([word.strip() for word in line if word] for line in (begun, done))
    assert begun[0].endswith("language_modelling/begun") and done[0].endswith("translation/done")
    assert begun[1:5] == ["0 of 5", "validation_loss 3.500", "2026-11-23 01:02", "gpt2"]
    assert done[1:3] == ["1,800 of 1,800", "test bleu 39.542, test chrf 63.100"]
    assert done[4] == "-" and float(done[5].removesuffix(" MB")) >= 0


def test_a_run_that_is_damaged_is_listed_with_what_can_be_read(folder, capsys):
    for path in folder.rglob("config.json"):
        path.write_text("{")
    for path in folder.rglob("scores.json"):
        path.write_text("[1]")
    runs.main(cli.parse({"default": runs.RunsOptions()}, [str(folder)], positional="folders"))
    assert capsys.readouterr().out.count("\n") == 3


def test_a_folder_without_runs_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no run in .*: train first"):
        runs.main(runs.RunsOptions((str(tmp_path),)))


def test_the_settings_that_differ_are_named_with_both_values(folder, capsys):
    done, begun = folder / "translation" / "done", folder / "language_modelling" / "begun"
    diff.main(diff.DiffOptions((str(done), str(begun))))
    assert capsys.readouterr().out.splitlines() == [
        'init_from: absent -> "gpt2"',
        'name: absent -> "begun"',
        "optimizer.b2: 0.9 -> absent",
        "optimizer.total_steps: 1800 -> 5",
    ]
    diff.main(diff.DiffOptions((str(done), str(done / "config.json"))))
    assert capsys.readouterr().out == "the settings are equal\n"


def test_another_number_of_runs_than_two_is_refused():
    with pytest.raises(ConfigError, match="1 runs were given: give 2"):
        diff.DiffOptions(("a",))
    with pytest.raises(ConfigError, match="no runs were given"):
        diff.main(diff.DiffOptions())
