"""Runs that are trained once a session, and trainings that share their compiled steps."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jax.tree_util import Partial

from experiments.harness.runs import run_folder
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.training import chips
from jaxformer.config import with_fields
from tests.experiments.commands import call
from tests.made_once import made_once

SAME_STEP = {
    "name": "",
    "runs": "",
    "continue_from": "",
    "training.seed": 0,
    "training.loggers": (),
    "training.patience": 0,
    "training.early_stopping_metric": "",
    "training.early_stopping_mode": "auto",
}
"""Settings that the step of a run does not depend on, and one value for them."""


class SharedStep:
    """The command `train` of an experiment, whose runs of the same settings share a step."""

    def __init__(self, train: Any) -> None:
        self.train = train
        self.programs: dict[Any, Any] = {}

    def main(self, config: Any) -> Any:
        """The result of the training."""
        return self.train.train(config, make_step=self.make_step)

    def make_step(self, config: Any, model: Any, batch: Any, devices: Any) -> Any:
        """The result of the experiment's `make_step`, compiled at the first call."""
        endless = {"optimizer.total_steps": 99} if config.optimizer.schedule == "constant" else {}
        key = with_fields(config, SAME_STEP | endless)
        init, step = self.train.make_step(config, model, batch, devices)
        begin, step = self.programs.setdefault(key, (init.func, step))
        return Partial(begin, *init.args), step


shared_step = cache(SharedStep)


class Trained(NamedTuple):
    """A run that has ended."""

    folder: Path
    config: Any
    """The configuration that it was trained with."""
    text: Path
    """The folder of the files that `config` names."""
    out: str
    """The standard output of its training."""
    err: str
    """The standard error of its training."""
    train: SharedStep
    """The command that trained it."""


def trained_once(
    factory: pytest.TempPathFactory,
    worker: str,
    train: Any,
    configure: Callable[[Path], Any],
) -> Trained:
    """The run of the module `train` with the settings that `configure` returns for a folder."""
    command = shared_step(train)

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(chips.DEVICE_KINDS, "cpu", "l4")  # so that mfu is logged
            done = call(command, configure(folder))
        assert done.code == 0, done.err
        (folder / "OUT").write_text(done.out)
        (folder / "ERR").write_text(done.err)

    return read_trained(made_once(factory, configure.__name__, make, worker), command)


def read_trained(text: Path, command: SharedStep) -> Trained:
    """The run in the folder `text`, which holds its text too."""
    (folder,) = (text / "runs" / command.train.EXPERIMENT).iterdir()
    kind = type(next(iter(command.train.PRESETS.values())))
    config = run_folder.load_config(folder, kind)
    printed = ((text / name).read_text() for name in ("OUT", "ERR"))
    return Trained(folder, config, text, *printed, command)


def copied(run: Trained, text: Path) -> Trained:
    """A copy of `run` and of its text in the folder `text`, to be changed."""
    shutil.copytree(run.text, text)
    path = text / run.folder.relative_to(run.text) / "config.json"
    path.write_text(path.read_text().replace(str(run.text), str(text)))
    return read_trained(text, run.train)


@contextmanager
def loaded_once(*modules: Any, runs: tuple[Trained, ...]) -> Iterator[None]:
    """Within it, `load_run` of `modules` reads each of `runs` once for all commands."""
    folders = {run.folder for run in runs}
    known: dict[Any, Any] = {}
    load = modules[0].load_run

    def load_once(folder: Path, options: Any = RunOptions(), *more: Any, **named: Any) -> Any:
        key = folder, options.checkpoint, options.step
        if folder not in folders:
            return load(folder, options, *more, **named)
        if key not in known:
            known[key] = load(folder, options, *more, **named)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "load_run", load_once)
        yield


class StopAt4:
    """A logger that asks the process to stop when step 4 is logged: while step 5 computes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def log(self, step: int, metrics: Any) -> None:
        """Sends the signal."""
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)  # a thread takes the signal

    def close(self) -> None:
        """Leaves a sign."""
        (self.folder / "closed").touch()
