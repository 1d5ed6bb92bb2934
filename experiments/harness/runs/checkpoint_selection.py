"""A run's final weights: the mean of the last checkpoints, or the best one."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.runs import distributed
from experiments.harness.runs.distributed import ProcessOptions
from jaxformer import storage
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import Natural
from jaxformer.distributed import (
    Strategy,
    agreed,
    make_mesh,
    parse_mesh,
    replicated,
    sharded,
    single,
)
from jaxformer.errors import ConfigError, Diverged
from jaxformer.pretrained import CheckpointName, RunWeights, last_steps, select_weights
from jaxformer.pretrained.run_weights import weights_of
from jaxformer.records import Record


@dataclass(frozen=True)
class RunOptions(ProcessOptions):
    """The weights that a command uses."""

    run: str = ""
    """The folder of the run."""
    _: KW_ONLY
    checkpoint: CheckpointName = "final"
    """Weights to load: final (chosen when training ended; before: the newest), best (of the best
    validation), last (of the newest step), average (mean of the last steps) or ema (moving
    average)."""
    step: Natural | None = None
    """The step whose weights are used, if its checkpoint is kept; None: --checkpoint decides."""
    mesh: str = ""
    """The division of the weights of a model that is too large for one device, such as tensor=4 or
    fsdp=4,tensor=2. Empty: the first device has them, or each device of several processes."""

    def __post_init__(self):
        super().__post_init__()
        parse_mesh(self.mesh)

    @property
    def folder(self) -> Path:
        """The folder of the run, here or in a bucket."""
        return storage.to_path(self.run)

    @property
    def strategy(self) -> Strategy:
        """Placement of the weights."""
        if self.mesh:
            return sharded(make_mesh(self.mesh))
        return replicated() if distributed.is_several() else single()


FINAL = RunOptions()
"""The weights that a command takes by itself."""


class Chosen(NamedTuple):
    """The final weights, the `steps` whose mean they are, and the metric they were chosen by."""

    params: Any
    steps: list[int]
    metric: float


def choose(
    checkpoints: Checkpoints,
    training: Any,
    metric: Callable[[Any, list[int]], float],
    devices: Strategy,
) -> Chosen:
    """The mean of the last `training.average_checkpoints` checkpoints, or the best one alone.

    The one with the smaller metric(params, steps) wins, the mean wins a tie, and one that is not
    finite never wins. `devices` hold the parameters. Raises `Diverged` where none is finite.
    """
    last = last_steps(checkpoints, training.average_checkpoints)
    # Only the first process notes a validation: another one may not see that of the last step yet.
    best = int(agreed(checkpoints.best_step() or 0)) or None
    chosen: Chosen | None = None
    for steps in [last] if best is None or last == [best] else [last, [best]]:
        params = checkpoints.average_params(
            steps, tree=training.result_tree, shardings=devices.shardings
        )
        value = metric(params, steps)
        if math.isfinite(value) and (chosen is None or value < chosen.metric):
            chosen = Chosen(params, steps, value)
    if chosen is None:
        raise Diverged(
            "the validation of no checkpoint is finite: lower the learning rate, or train with "
            "--model.dtype float32, under another --name"
        )
    return chosen


def note(folder: Path, steps: list[int], tree: str, **scores: float) -> None:
    """Records that the final weights are the mean of `tree` over `steps`, and their scores.

    `jaxformer.load` reads both; `tree` is a field of the state, such as "params" or "ema".
    """
    weights_of(folder).write({"steps": steps, "tree": tree, **scores})


def scores_of(folder: Path) -> Record:
    """The record of the scores that end the training in `folder`."""
    return Record(folder / "scores.json", "score the run again: the command of its training does")


def select(folder: Path, options: RunOptions = FINAL) -> RunWeights:
    """The weights of the run in `folder` that `options` name; raises as `select_weights` does."""
    return select_weights(folder, options.checkpoint, options.step)


def forget(folder: Path) -> None:
    """Removes the record of the final weights, which a run that trains on does not have yet."""
    path = weights_of(folder).path
    if distributed.is_first() and path.exists():
        storage.remove(path)


class TrainResult(NamedTuple):
    """The results of a training in its `folder`."""

    folder: Path
    steps: list[int]
    """The steps whose mean are the final weights."""
    validation: dict[str, float]
    """The scores of the validation text by which they were chosen."""
    scores: dict[str, Any]
    """The content of scores.json: the scores of the test text, or of the validation text."""


def read_result(folder: Path) -> TrainResult:
    """The result of the finished training in `folder`; `ConfigError` where there is none."""
    scores = scores_of(folder).read()
    if not scores:
        raise ConfigError(f"{folder} has no scores.json: finish its training first")
    validation = weights_of(folder).read(steps=list)
    validation.pop("tree", None)
    return TrainResult(folder, validation.pop("steps", []), validation, scores)
