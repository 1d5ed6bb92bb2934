"""A run's final weights: the mean of the last checkpoints, or the best one."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from experiments.harness.runs import distributed
from experiments.harness.runs.distributed import ProcessOptions
from experiments.harness.runs.run_files import Record
from jaxformer import storage
from jaxformer.checkpoint import Checkpoints, manifest
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
from jaxformer.errors import CheckpointError, ConfigError, Diverged
from jaxformer.pretrained import Loaded

CheckpointName = Literal["final", "best", "last", "average", "ema"]
_REMEDY = "remove it to use the newest checkpoint"

_Loaded = TypeVar("_Loaded", bound=Loaded)


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
        if self.step is not None and self.checkpoint in ("best", "average"):
            raise ConfigError(
                f"step={self.step} and checkpoint={self.checkpoint!r} both choose a step: give one"
            )

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

    def check_pretrained(self) -> None:
        """Raises `ConfigError` where one of several weights is asked for, but there is only one."""
        if self.checkpoint != "final" or self.step is not None:
            raise ConfigError(
                f"{self.run} is a folder of transformers, which has one set of weights: leave out "
                "--checkpoint and --step"
            )


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
    last = _last(checkpoints, training)
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


def _last(checkpoints: Checkpoints, training: Any) -> list[int]:
    """The last `training.average_checkpoints` steps that `save_every` asked for, and the newest.

    The newest does not count if only its validation has saved it. A resumed run averages the same
    steps as one that was never stopped.
    """
    steps = checkpoints.steps()
    saved = {step: manifest.read(checkpoints.folder / str(step)) for step in steps}
    averaged = [step for step in steps if saved[step].regular]
    if not averaged or not saved[steps[-1]].metadata.get("saved_as_best"):
        averaged = sorted({*averaged, steps[-1]})
    return averaged[-training.average_checkpoints :]


def note(folder: Path, steps: list[int], tree: str, **scores: float) -> None:
    """Records that the final weights are the mean of `tree` over `steps`, and their scores.

    `jaxformer.load` reads both; `tree` is a field of the state, such as "params" or "ema".
    """
    weights_of(folder).write({"steps": steps, "tree": tree, **scores})


def weights_of(folder: Path) -> Record:
    """The record of the weights that were chosen when the training in `folder` ended."""
    return Record(folder / "weights.json", _REMEDY)


def scores_of(folder: Path) -> Record:
    """The record of the scores that end the training in `folder`."""
    return Record(folder / "scores.json", "score the run again: the command of its training does")


class Weights(NamedTuple):
    """Weights of the run in `folder`: the mean over `steps` of the field `tree` of its states."""

    folder: Path
    steps: list[int]
    tree: str

    def read(self, devices: Strategy) -> Any:
        """Their parameters, on `devices`."""
        checkpoints = Checkpoints(self.folder / "checkpoints")
        return checkpoints.average_params(self.steps, tree=self.tree, shardings=devices.shardings)


def load(folder: Path, training: Any, options: RunOptions = FINAL) -> Any:
    """The weights that `select` gives, on the first device."""
    return select(folder, training, options).read(single())


def select(folder: Path, training: Any, options: RunOptions = FINAL) -> Weights:
    """The weights of the run in `folder` that `options` name.

    Raises `CheckpointError` where there is no complete checkpoint, or none of the step asked for,
    `ConfigError` for a moving average that the run does not keep, `DataError` where the record of
    the final choice is damaged.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    newest, kept = checkpoints.newest_step(), checkpoints.steps()
    if newest is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint: train first")
    if options.step is not None and options.step not in kept:
        raise CheckpointError(
            f"{folder} has no checkpoint of step {options.step}: it keeps {_listed(kept)}"
        )
    if options.checkpoint == "ema" and training.result_tree == "params":
        raise ConfigError(f"{folder} keeps no moving average: it was trained with ema_decay=0")
    steps = [newest if options.step is None else options.step]
    if options.checkpoint == "average":
        steps = _last(checkpoints, training)
    elif options.checkpoint == "best":
        steps = [checkpoints.best_step() or newest]
    elif options.checkpoint == "final" and options.step is None:
        steps = _final(folder, kept)
    tree = "params" if options.checkpoint == "last" else training.result_tree
    return Weights(folder, steps, tree)


def _final(folder: Path, kept: list[int]) -> list[int]:
    """The steps that were chosen when training ended, or the newest one."""
    steps = weights_of(folder).read(steps=list).get("steps", kept[-1:])
    if not steps or not set(steps) <= set(kept):
        raise CheckpointError(
            f"{weights_of(folder).path} names the weights of step {_listed(steps)}, but the run "
            f"keeps {_listed(kept)}: put the step back, or {_REMEDY}"
        )
    return steps


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


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


def check_folder(folder: Path) -> None:
    """Raises `ConfigError` unless `folder` is that of a run."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give --run the folder of a trained run")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.json")
