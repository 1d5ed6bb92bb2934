"""A sweep trains each cell once, as the run started alone, and keeps failures apart."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import registry
from experiments.harness.runs import run_folder
from experiments.language_modelling import train as language_modelling
from experiments.sweep import (
    SweepOptions,
    main,
    name_cells,
    open_cells,
    read_vary,
    result_of,
    sweep,
    train_cells,
)
from experiments.translation.presets import PRESETS as TRANSLATION
from jaxformer import records
from jaxformer.config import to_plain
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained.run_weights import select_weights
from jaxformer.training.parameters import flatten
from tests.experiments import own_parts
from tests.experiments.commands import call, metrics_of
from tests.experiments.tiny_runs import language_config

RATES = (3e-3, 1e-3)
DOUBLED = "tests.experiments.own_parts:doubled_loss"
VARY = {"optimizer.learning_rate": RATES, "training.loss": [DOUBLED]}


def failing_loss(model, **options):
    raise DataError("no loss today")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return language_config(tmp_path_factory.mktemp("sweep"), training__log_every=1, name="rates")


@pytest.fixture(scope="module")
def swept(config):
    """The command of a sweep over learning rates and losses, of which one fails; do not change."""
    path = Path(config.runs).with_name("settings.json")
    path.write_text(json.dumps(to_plain(config)))
    losses = f"training.loss={__name__}:failing_loss,{DOUBLED}"
    rates = f"optimizer.learning_rate={RATES[0]},{RATES[1]}"
    words = ["--vary", rates, losses, "--config", str(path), "language_modelling"]
    return call(SimpleNamespace(main=main), words)


def cell(rate, loss=DOUBLED, seed=0):
    """The name of a cell."""
    return f"learning_rate={rate},loss={loss.replace(':', '-')},seed={seed}"


@pytest.fixture(scope="module")
def results(config, swept):
    """What the finished cells give to a script that calls the sweep again."""
    return sweep(config, name="rates", vary=VARY)


def contents(result):
    """The parameters and metrics of a run, without what depends on the time."""
    params = select_weights(result.folder).read()
    return metrics_of(result.folder), {
        path: np.asarray(leaf).tobytes() for path, leaf in flatten(params).items()
    }


def variants():
    yield {"optimizer.b1": 0.8, "training.seed": 5}
    yield {"optimizer.b2": 0.7}


@pytest.mark.long
def test_each_cell_is_the_run_started_alone_to_the_bit(config, results):
    assert list(results) == [cell(rate) for rate in RATES]
    optimizer = replace(config.optimizer, learning_rate=RATES[0])
    alone = replace(config, name="alone", optimizer=optimizer)
    alone = language_modelling.train(alone, loss=own_parts.doubled_loss)
    first, second = results.values()
    assert contents(first) == contents(alone) and first.scores == alone.scores
    assert contents(first) != contents(second) and "ids" in contents(first)[0][0]


@pytest.mark.long
def test_sweep_json_says_what_the_cells_are_and_a_cell_its_sweep(config, results):
    folder = results[cell(0.003)].folder
    record = json.loads((folder.parents[1] / "sweep.json").read_text())
    assert record["experiment"] == folder.parent.name == "language_modelling"
    assert record["settings"]["model"]["d_model"] == 16 and len(record["cells"]) == 4
    settings = {"optimizer.learning_rate": 0.003, "training.loss": DOUBLED, "training.seed": 0}
    assert record["cells"][cell(0.003)] == settings
    stored = json.loads((folder / "config.json").read_text())
    assert stored["sweep"] == "rates" and stored["training"]["loss"] == DOUBLED


@pytest.mark.long
def test_a_failure_ends_its_cell_alone_and_gives_the_exit_code(config, swept):
    assert swept.code == 65
    assert "2 of 4 cells are finished" in swept.out and "no loss today" in swept.err
    folder = Path(config.runs, "sweeps", "rates", "failed")
    expected = {cell(rate, f"{__name__}:failing_loss") for rate in RATES}
    assert {path.stem for path in folder.iterdir()} == expected
    for path in folder.iterdir():
        assert json.loads(path.read_text())["exit_code"] == 65
        assert 'raise DataError("no loss today")' in path.read_text().replace('\\"', '"')


@pytest.mark.long
def test_called_again_a_sweep_keeps_its_settings(config, results):
    with pytest.raises(ConfigError, match="data.batch_size"):
        sweep(replace(config, data=replace(config.data, batch_size=5)), name="rates", seeds=3)


@pytest.mark.long
def test_a_sweep_with_another_test_text_scores_its_trained_cells_on_it(config, results, tmp_path):
    shutil.copytree(config.runs, tmp_path / "runs")
    (tmp_path / "other.txt").write_text("moon sun star\n" * 97)
    data = replace(config.data, test=(str(tmp_path / "other.txt"),))
    moved = replace(config, runs=str(tmp_path / "runs"), data=data)
    (after,) = sweep(moved, name="rates", vary=VARY | {"optimizer.learning_rate": [1e-3]}).values()
    before = results[cell(0.001)]
    assert before.scores["text_sha256"] != after.scores["text_sha256"]
    assert contents(before) == contents(after), "it is not trained again"


class Training:
    """An experiment whose training takes no time and leaves the beam size as its score."""

    EXPERIMENT = "translation"

    def __init__(self):
        self.begun = []

    def train(self, config, loggers=()):
        self.begun.append(config.name)
        if len(self.begun) == 2:
            raise KeyboardInterrupt
        folder = run_folder.folder_of(config.runs, "translation", config.name)
        (folder / "checkpoints" / "40").mkdir(parents=True, exist_ok=True)
        records.write_json(folder / "config.json", to_plain(config))
        run_folder.scores_of(folder).write({"bleu": config.search.beam_size})

    def sweep(self, config, seeds):
        runs = open_cells(self, config, name_cells(config, {}, seeds=seeds))
        train_cells(self, runs)
        return [result_of(self, run).scores["bleu"] for run in runs]


def test_a_sweep_goes_on_where_it_ended_and_trains_what_is_new_and_scores_what_changed(tmp_path):
    training, config = Training(), replace(TRANSLATION["grammar"], name="s", runs=str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        training.sweep(config, 2)
    assert training.sweep(config, 2) == [4, 4] and training.begun == ["seed=0", "seed=1", "seed=1"]
    assert training.sweep(config, 3) == [4, 4, 4] and training.begun[3:] == ["seed=2"]
    wider = replace(config, search=replace(config.search, beam_size=7))
    assert training.sweep(wider, 1) == [7] and training.begun[4:] == ["seed=0"]
    stored = json.loads((tmp_path / "sweeps" / "s" / "sweep.json").read_text())
    assert len(stored["cells"]) == 3 and stored["settings"]["search"]["beam_size"] == 7


def test_cells_have_readable_names_that_differ(config):
    grid = {"model.positions": ["rotary", "none"], "optimizer.b1": [0.5]}
    assert list(name_cells(config, grid, seeds=2)) == [
        "positions=rotary,b1=0.5,seed=0",
        "positions=rotary,b1=0.5,seed=1",
        "positions=none,b1=0.5,seed=0",
        "positions=none,b1=0.5,seed=1",
    ]
    own = name_cells(config, {}, variants(), 2)
    assert list(own) == ["b1=0.8,seed=5", "b2=0.7,seed=0", "b2=0.7,seed=1"]
    widths = {"model.d_ff": np.arange(32, 65, 32)}
    assert list(name_cells(config, widths)) == ["d_ff=32,seed=0", "d_ff=64,seed=0"]
    text = [{"training.block": "a.b:C", "data.train": ["x/y.txt", "z"], "mesh": ""}]
    (name,) = name_cells(config, {}, text)
    assert name == "block=a.b-C,train=x-y.txt-z,mesh=none,seed=0"
    with pytest.raises(ConfigError, match="b1=0.5,seed=0"):
        name_cells(config, {}, [{"optimizer.b1": 0.5}, {"optimizer.b1": 0.5}])


def test_values_of_the_command_line_have_the_types_of_their_fields():
    words = ["language_modelling", "--vary", "optimizer.learning_rate=1e-3,2", "--seeds", "2"]
    words += ["--vary=model.positions=rotary", "profile=True,false"]
    _, config, options, typed = registry.parse(words, SweepOptions(), "")
    assert (
        options.seeds == 2
        and not typed
        and read_vary(config, options.vary)
        == {
            "optimizer.learning_rate": [0.001, 2.0],
            "model.positions": ["rotary"],
            "profile": [True, False],
        }
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("learning_rate=1", "no option --learning_rate: use --optimizer.learning_rate"),
        ("model=1", "no option --model: it is a group of options, such as --model."),
        ("model.d_model=16,x", 'model.d_model is "x", but must be int'),
        ("model.d_model", "--vary model.d_model: give each field once, as FIELD=VALUE,VALUE"),
        ("model.d_model=", "--vary model.d_model=: give each field once"),
    ],
)
def test_a_wrong_variation_is_refused(config, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_vary(config, [text])


def command(config, folder, *options):
    """The command that sweeps over two rates and seeds of `config`."""
    (folder / "settings.json").write_text(json.dumps(to_plain(config)))
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
