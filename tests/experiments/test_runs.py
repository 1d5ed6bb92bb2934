"""Runs are listed with what they reached, and the settings of two are compared."""

import json
import re

import pytest

from experiments import runs
from jaxformer.checkpoint.lock import lock
from tests.experiments.finished_runs import sentences, worse, write_run
from tests.faults import states


@pytest.fixture
def folder(tmp_path):
    """A run that is done, one that was stopped, and one whose start was refused."""
    times = {"done": "2026-11-22T10:31:05+00:00", "begun": "2026-11-23T01:02:03+00:00"}
    for run in ("translation/done", "language_modelling/begun", "language_modelling/never"):
        path = tmp_path / "runs" / run
        path.mkdir(parents=True)
        (path / "env.json").write_text(json.dumps({"time": times.get(path.name), "earlier": []}))
        (path / "config.json").write_text("{}")
    done, begun = (next((tmp_path / "runs").glob(f"*/{name}")) for name in ("done", "begun"))
    states.make_folder(done / "checkpoints", (300, 1_800))
    (done / "config.json").write_text(json.dumps({"optimizer": {"total_steps": 1_800, "b2": 0.9}}))
    settings = {"optimizer": {"total_steps": 5}, "init_from": "gpt2", "name": "begun"}
    (begun / "config.json").write_text(json.dumps(settings))
    (done / "scores.json").write_text('{"text": "test", "bleu": 39.5416, "chrf": 63.1, "loss": 1}')
    (done / "weights.json").write_text('{"steps": [1800]}')
    lines = [{"step": 2, "validation_loss": 3.5}, {"step": 3, "loss": 3.0}]
    (begun / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "runs"


def listed(folder, capsys):
    """The rows of the list, as {last word of the run's folder: {title: cell}}."""
    runs.main(["list", str(folder)])
    head, *lines = (re.split("  +", line) for line in capsys.readouterr().out.splitlines())
    return {row[0].rpartition("/")[2]: dict(zip(head, row, strict=True)) for row in lines}


def test_each_run_has_a_line_with_state_steps_score_date_and_parent(folder, capsys):
    rows = listed(folder, capsys)
    assert list(rows) == ["begun", "done"], "a start that never began is forgotten"
    begun, done = rows["begun"], rows["done"]
    assert begun["state"] == "stopped" and begun["steps"] == "3 of 5"
    assert begun["score"] == "validation loss 3.5"
    assert begun["started"] == "2026-11-23 01:02" and begun["parent"] == "gpt2"
    assert done["state"] == "done" and done["steps"] == "1,800 of 1,800"
    assert done["score"] == "test BLEU 39.54, test chrF 63.1" and done["parent"] == "-"
    path = folder / "language_modelling" / "begun"
    (path / "env.json").write_text(json.dumps({"failed": "the disk is full"}))
    assert listed(folder, capsys)["begun"]["state"] == "failed"
    with lock(path / "checkpoints"):
        assert listed(folder, capsys)["begun"]["state"] == "running"
    assert listed(folder, capsys)["begun"]["state"] == "failed"


def test_a_sweep_is_a_line_with_its_cells_and_its_best_score(tmp_path, capsys):
    text = sentences(29, seed=1)
    for width, share in ((7, 0.4), (8, 0.1)):
        run = tmp_path / "sweeps" / "widths" / "translation" / f"width={width}"
        write_run(run, worse(text, share, 3), text, width=width)
    (tmp_path / "sweeps" / "widths" / "sweep.json").write_text(
        '{"cells": {"a": 1, "b": 2, "c": 3}}'
    )
    row = listed(tmp_path, capsys)["widths"]
    assert row["state"] == "2 of 3 cells done"
    assert re.fullmatch(r"best BLEU [\d.]+ \(width=8\)", row["score"])


def test_a_run_that_is_damaged_is_listed_with_what_can_be_read(folder, capsys):
    for name in ("config", "scores", "env"):
        for path in folder.rglob(f"{name}.json"):
            path.write_text("[1]" if name == "scores" else "{")
    assert list(listed(folder, capsys)) == ["begun", "done"]


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
