"""Runs are listed with what they reached, and the settings of two are compared."""

import json
import re
import sys

import pytest

from experiments import runs
from experiments.harness.results.run_facts import seconds_of
from experiments.harness.results.tables import Table, in_columns
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
    (folder / "translation" / "done" / "scores.json").write_text('{"text": "te')
    assert listed(folder, capsys)["done"]["score"] == "scores.json is damaged"


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
    shown = capsys.readouterr().out
    assert f"\n  {word}  " in shown and max(map(len, shown.splitlines())) <= 80
    with pytest.raises(SystemExit) as end:
        runs.main([word, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and len(lines) <= 60 and max(map(len, lines)) <= 80


def test_a_list_fits_into_the_columns_of_a_terminal(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    runs.main(["list", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    names = [line for line in lines if not line.startswith(" ")]
    assert [name.rpartition("/")[2] for name in names] == ["begun", "done"]
    others = [line for line in lines if line.startswith("  ")]
    assert others and max(map(len, others)) <= 80
    assert "state done" in " ".join(others) and "score test BLEU 39.54" in " ".join(others)


def test_a_table_that_fits_is_a_table_also_on_a_terminal():
    table = Table(("run", "state"), [("a", "done"), ("b", "-")])
    assert in_columns(table, 80) == in_columns(table, None) == "run  state\na    done\nb    -"
    assert in_columns(table, 8) == "a\n  state\n  done\nb"


@pytest.mark.parametrize(
    ("starts", "seconds"),
    [
        ([{"time": "10:00:00", "finished": "10:04:06"}], 246.0),
        ([{"time": "10:00:00", "seconds": 29}, {"time": "11:00:00", "finished": "11:00:31"}], 60.0),
        ([{"time": "10:00:00", "finished": "10:04:06", "seconds": 200}, {"failed": "x"}], 246.0),
        ([{"time": "10:00:00", "seconds": 29}], None),
        ([{"time": "10:00:00"}, {"time": "11:00:00", "finished": "11:00:31"}], None),
    ],
)
def test_the_time_of_a_run_survives_a_start_that_was_refused(starts, seconds):
    text = re.sub(r"(\d\d:\d\d:\d\d)", r"2026-11-29T\1+00:00", json.dumps(starts))
    *earlier, last = json.loads(text)
    assert seconds_of({**last, "earlier": earlier}) == seconds


def test_options_may_stand_before_the_word(tmp_path, capsys):
    text = sentences(13, seed=1)
    run = write_run(tmp_path / "a", worse(text, 0.3, 3), text)
    printed = []
    for args in (
        ["compare", str(run), "--format", "csv"],
        ["--format", "csv", "compare", str(run)],
    ):
        runs.main(args)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and printed[0].startswith("bleu,n,mean")
