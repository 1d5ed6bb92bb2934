"""A sweep trains each cell once, as the run started alone, and keeps failures apart."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import runs
from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.results import sweeping
from experiments.harness.runs import checkpoint_selection, run_folder
from experiments.language_modelling import train as language_modelling
from experiments.language_modelling.presets import PRESETS
from experiments.sweep import main, presets_of, sweep
from experiments.translation.presets import PRESETS as TRANSLATION
from jaxformer.checkpoint.lock import lock
from jaxformer.errors import ConfigError, DataError
from jaxformer.training.parameters import flatten
from tests.experiments import own_parts
from tests.experiments.commands import metrics_of
from tests.experiments.tiny_runs import language_config

RATES = (1e-2, 3e-3, 1e-3)
TRAINING = PRESETS["python_stdlib"].training


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return language_config(tmp_path_factory.mktemp("sweep"), training__log_every=1)


@pytest.fixture(scope="module")
def rates(config):
    """The results of a sweep over learning rates."""
    return sweep(config, name="rates", vary={"optimizer.learning_rate": RATES})


def contents(result):
    """The parameters and metrics of a run, without what depends on the time."""
    params = checkpoint_selection.load(result.folder, TRAINING)
    return metrics_of(result.folder), {
        path: np.asarray(leaf).tobytes() for path, leaf in flatten(params).items()
    }


def variants():
    yield {"optimizer.b1": 0.8, "training.seed": 5}
    yield {"optimizer.b2": 0.7}


def failing_loss(model, **options):
    raise DataError("no loss today")


@pytest.mark.long
def test_each_cell_is_the_run_started_alone_to_the_bit(config, rates):
    optimizer = replace(config.optimizer, learning_rate=3e-3)
    alone = language_modelling.train(replace(config, name="alone", optimizer=optimizer))
    cell = rates["learning_rate=0.003,seed=0"]
    assert contents(cell) == contents(alone) and cell.scores == alone.scores
    assert contents(cell) != contents(rates["learning_rate=0.001,seed=0"])


@pytest.mark.long
def test_sweep_json_says_what_the_cells_are_and_a_cell_its_sweep(config, rates):
    folder = rates["learning_rate=0.01,seed=0"].folder
    record = json.loads((folder.parents[1] / "sweep.json").read_text())
    assert record["experiment"] == folder.parent.name == "language_modelling"
    assert record["settings"]["model"]["d_model"] == 16 and set(record["cells"]) == set(rates)
    settings = {"optimizer.learning_rate": 0.01, "training.seed": 0}
    assert record["cells"]["learning_rate=0.01,seed=0"] == settings
    assert json.loads((folder / "config.json").read_text())["sweep"] == "rates"


@pytest.mark.long
def test_called_again_a_sweep_trains_what_is_new_alone(config, rates, capsys):
    again = sweep(config, name="rates", vary={"optimizer.learning_rate": RATES[:1]}, seeds=2)
    assert capsys.readouterr().out.count("finished before") == 1
    assert list(again) == ["learning_rate=0.01,seed=0", "learning_rate=0.01,seed=1"]
    assert again["learning_rate=0.01,seed=0"] == rates["learning_rate=0.01,seed=0"]
    folder = again["learning_rate=0.01,seed=1"].folder.parents[1]
    assert len(json.loads((folder / "sweep.json").read_text())["cells"]) == 4
    wider = replace(config, data=replace(config.data, batch_size=5))
    with pytest.raises(ConfigError, match="data.batch_size is 3 there but 5 here: use another"):
        sweep(wider, name="rates", seeds=3)


def scored_by_beam_size(config):
    """A training that leaves the beam size as its score."""
    folder = run_folder.folder_of(config.runs, "translation", config.name)
    (folder / "checkpoints" / "40").mkdir(parents=True, exist_ok=True)
    run_folder.write_json(folder / "config.json", config_files.plain(config))
    run_folder.write_json(folder / "scores.json", {"bleu": config.search.beam_size})


def test_a_sweep_with_another_beam_size_is_scored_again(tmp_path):
    config = replace(TRANSLATION["grammar"], name="beams", runs=str(tmp_path))
    cells = sweeping.name_cells(config, [{}], seeds=2)
    trained = []
    for size in (4, 7, 7):
        changed = replace(config, search=replace(config.search, beam_size=size), verbose=size == 7)
        opened = sweeping.open_sweep(changed, "translation", cells)
        trained.append(sum(opened.result(cell) is None for cell in cells))
        sweeping.run_cells(opened, scored_by_beam_size)
        assert [opened.result(cell).scores["bleu"] for cell in cells] == [size, size]
        stored = json.loads((opened.folder / "sweep.json").read_text())
        assert stored["settings"]["search"]["beam_size"] == size
    assert trained == [2, 2, 0]


@pytest.mark.long
def test_a_sweep_with_another_test_text_scores_its_trained_cells_on_it(config, tmp_path):
    config = replace(config, name="texts")
    (before,) = sweep(config, name="texts").values()
    (tmp_path / "other.txt").write_text("moon sun star\n" * 97)
    data = replace(config.data, test=(str(tmp_path / "other.txt"),))
    (after,) = sweep(replace(config, data=data), name="texts").values()
    assert before.scores["text_sha256"] != after.scores["text_sha256"]
    steps = [json.loads(line)["step"] for line in (after.folder / "metrics.jsonl").open()]
    assert max(steps) == 4 and contents(before)[1] == contents(after)[1]


@pytest.mark.long
def test_a_sweep_opened_again_is_not_written_again(config, rates):
    path = Path(config.runs, "sweeps", "rates", "sweep.json")
    before = path.stat()
    cells = json.loads(path.read_text())["cells"]
    sweeping.open_sweep(replace(config, name="rates"), "language_modelling", cells)
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_ino == before.st_ino


@pytest.mark.long
def test_a_sweep_is_one_line_among_the_runs(config, rates, capsys):
    runs.main([config.runs])
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "rates" in x]
    assert " of " in line and " cells " in line
    runs.main([f"{config.runs}/sweeps/rates"])
    assert "learning_rate=0.003,seed=0" in capsys.readouterr().out


@pytest.mark.long
def test_values_of_ones_own_reach_each_cell(config):
    (cell,) = sweep(config, name="own", loss=own_parts.doubled_loss).values()
    assert "ids" in contents(cell)[0][0]
    stored = json.loads((cell.folder / "config.json").read_text())["training"]
    assert stored["loss"] == "tests.experiments.own_parts:doubled_loss"


@pytest.mark.long
def test_a_failure_ends_its_cell_alone_and_gives_the_exit_code(config, capsys):
    losses = f"training.loss={__name__}:failing_loss,tests.experiments.own_parts:doubled_loss"
    (config_file := Path(config.runs).with_name("failures.json")).write_text(
        json.dumps(config_files.plain(replace(config, name="failures")))
    )
    words = ["language_modelling", "--config", str(config_file), "--vary", losses]
    options = cli.parse(presets_of("language_modelling"), words, positional="experiment")
    assert cli.run(lambda: main(options)) == 65
    said = capsys.readouterr()
    assert "1 of 2 cells are finished" in said.out and "no loss today" in said.err
    failed = Path(config.runs, "sweeps", "failures", "failed")
    (path,) = failed.iterdir()
    assert path.stem == "loss=tests.experiments.test_sweep-failing_loss,seed=0"
    assert json.loads(path.read_text())["exit_code"] == 65
    assert 'raise DataError("no loss today")' in path.read_text().replace('\\"', '"')


@pytest.mark.long
def test_an_interrupted_sweep_goes_on_with_the_cell_that_was_begun(config):
    """In one process; `test_a_killed_sweep_...` kills real ones."""
    begun = []

    def train(cell):
        begun.append(cell.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return language_modelling.train(cell)

    cells = sweeping.name_cells(config, [{}], seeds=3)
    opened = sweeping.open_sweep(replace(config, name="stopped"), "language_modelling", cells)
    with pytest.raises(KeyboardInterrupt):
        sweeping.run_cells(opened, train)
    sweeping.run_cells(opened, train)
    assert begun == ["seed=0", "seed=1", "seed=1", "seed=2"]
    assert not sweeping.failures(opened) and all(map(opened.result, cells))


def test_a_cell_that_another_process_trains_is_left_to_it(config, capsys):
    cells = sweeping.name_cells(config, [{}], seeds=2)
    opened = sweeping.open_sweep(replace(config, name="shared"), "language_modelling", cells)
    trained = []
    with closing(lock(opened.folder_of("seed=0"))):
        sweeping.run_cells(opened, lambda cell: trained.append(cell.name))
    assert trained == ["seed=1"] and "another process trains it" in capsys.readouterr().out


def test_cells_have_readable_names_that_differ(config):
    grid = sweeping.grid({"model.positions": ["rotary", "none"], "optimizer.b1": [0.5]})
    assert list(sweeping.name_cells(config, grid, 2)) == [
        "positions=rotary,b1=0.5,seed=0",
        "positions=rotary,b1=0.5,seed=1",
        "positions=none,b1=0.5,seed=0",
        "positions=none,b1=0.5,seed=1",
    ]
    own = sweeping.name_cells(config, variants(), 2)
    assert list(own) == ["b1=0.8,seed=5", "b2=0.7,seed=0", "b2=0.7,seed=1"]
    text = [{"training.block": "a.b:C", "data.train": ["x/y.txt", "z"], "mesh": ""}]
    (name,) = sweeping.name_cells(config, text, 1)
    assert name == "block=a.b-C,train=x-y.txt-z,mesh=none,seed=0"
    with pytest.raises(ConfigError, match="two cells would be named b1=0.5,seed=0"):
        sweeping.name_cells(config, [{"optimizer.b1": 0.5}, {"optimizer.b1": 0.5}], 1)


def test_values_of_the_command_line_have_the_types_of_their_fields(config):
    texts = ("optimizer.learning_rate=1e-3,2", "model.positions=rotary", "profile=True,false")
    assert sweeping.read_vary(config, texts) == {
        "optimizer.learning_rate": [0.001, 2.0],
        "model.positions": ["rotary"],
        "profile": [True, False],
    }


@pytest.mark.parametrize(
    "text, message",
    [
        ("learning_rate=1", "no setting learning_rate: give one such as optimizer.learning_rate"),
        ("model=1", "there is no setting model: give one such as model."),
        ("model.d_model=16,x", 'model.d_model is "x", but must be int'),
        ("model.d_model", "--vary model.d_model: give each field once, as FIELD=VALUE,VALUE"),
        ("model.d_model=", "--vary model.d_model=: give each field once"),
    ],
)
def test_a_wrong_variation_is_refused(config, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        sweeping.read_vary(config, [text])


def test_vary_given_several_times_has_all_values():
    words = "language_modelling --vary a=1 --seeds 2 --vary=b=2,3 c=4".split()
    options = cli.parse(presets_of("language_modelling"), words, positional="experiment")
    assert options.vary == ("a=1", "b=2,3", "c=4") and options.seeds == 2


def command(config, folder, *options):
    """The command that sweeps over two rates and seeds of `config`."""
    (folder / "settings.json").write_text(json.dumps(config_files.plain(config)))
    rates = "optimizer.learning_rate=1e-2,1e-3"
    words = ["--config", str(folder / "settings.json"), "--name", "s", "--vary", rates, *options]
    return [sys.executable, "-m", "experiments.sweep", "language_modelling", "--seeds", "2", *words]


@pytest.mark.slow
def test_a_killed_sweep_runs_each_cell_once(tmp_path):
    """Two processes train four cells; kill -9 at several moments, then one call that ends."""
    config = language_config(tmp_path, training__log_every=1)
    config = replace(config, optimizer=replace(config.optimizer, total_steps=200))
    words, folder = command(config, tmp_path, "--jobs", "2"), tmp_path / "runs" / "sweeps" / "s"
    for seconds in (25, 12, 9):
        with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as process:
            time.sleep(seconds)
            for child in children_of(process.pid):
                os.kill(child, signal.SIGKILL)
            process.kill()
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and "4 of 4 cells are finished" in done.stdout, done.stderr
    runs = sorted(path.parent for path in folder.glob("*/*/scores.json"))
    assert len(runs) == 4
    for run in runs:
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
        assert sorted(set(steps)) == list(range(1, 201))
    starts = [len(json.loads((run / "env.json").read_text())["earlier"]) for run in runs]
    assert sum(starts) <= 2 * 3  # each kill ends at most one start of each process


def children_of(pid):
    """The processes that `pid` has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
