"""The choice of a run's weights: the final ones, of a step, the best ones, or a mean."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxformer.checkpoint import Checkpoints, manifest
from jaxformer.distributed import Strategy
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.records import Record
from jaxformer.storage import read_json

CheckpointName = Literal["final", "best", "last", "average", "ema"]
_REMEDY = "remove it to use the newest checkpoint"


class RunWeights(NamedTuple):
    """Weights of the run in `folder`: the mean over `steps` of the field `tree` of its states."""

    folder: Path
    steps: list[int]
    tree: str

    def read(self, strategy: Strategy | None = None) -> dict[str, Any]:
        """Their parameters, on the devices of `strategy`; None: numpy arrays."""
        checkpoints = Checkpoints(self.folder / "checkpoints")
        shardings = strategy.shardings if strategy else None
        return checkpoints.average_params(self.steps, tree=self.tree, shardings=shardings)

    def read_unmerged(self) -> dict[str, Any]:
        """Their parameters with adapters beside their matrices, as numpy arrays."""
        checkpoints = Checkpoints(self.folder / "checkpoints")
        return checkpoints.average_unmerged(self.steps, tree=self.tree)

    def shapes(self) -> Any:
        """The shapes of these parameters."""
        checkpoints = Checkpoints(self.folder / "checkpoints")
        return checkpoints.param_shapes(self.steps[-1], tree=self.tree)


def select_weights(
    folder: Path, checkpoint: CheckpointName = "final", step: int | None = None
) -> RunWeights:
    """The weights of the run in `folder` that `load` describes.

    Raises `CheckpointError` where there is no complete checkpoint, or none of the step asked for,
    `ConfigError` for two ways to choose a step, and for a moving average that the run does not
    keep, `DataError` where the record of the final choice is damaged.
    """
    if step is not None and checkpoint in ("best", "average"):
        raise ConfigError(
            f"step={step} and checkpoint={checkpoint!r} both choose a step: give one of them"
        )
    checkpoints = Checkpoints(folder / "checkpoints")
    training = read_json(folder / "config.json", default={}).get("training", {})
    newest, kept = checkpoints.newest_step(), checkpoints.steps()
    if newest is None:
        raise CheckpointError(f"{folder} has no complete checkpoint: train first")
    if step is not None and step not in kept:
        raise CheckpointError(f"{folder} has no checkpoint of step {step}: it keeps {_list(kept)}")
    if checkpoint == "ema" and not training.get("ema_decay"):
        raise ConfigError(f"{folder} keeps no moving average: it was trained with ema_decay=0")
    tree = "ema" if training.get("ema_decay") and checkpoint != "last" else "params"
    if step is not None or checkpoint in ("last", "ema"):
        return RunWeights(folder, [newest if step is None else step], tree)
    if checkpoint == "average":
        return RunWeights(folder, last_steps(checkpoints, training["average_checkpoints"]), tree)
    if checkpoint == "best":
        return RunWeights(folder, [checkpoints.best_step() or newest], tree)
    return _final(folder, kept) or RunWeights(folder, [newest], tree)


def last_steps(checkpoints: Checkpoints, count: int) -> list[int]:
    """The last `count` steps that `save_every` asked for, and the newest.

    The newest does not count if only its validation has saved it. A resumed run averages the same
    steps as one that was never stopped.
    """
    steps = checkpoints.steps()
    saved = {step: manifest.read(checkpoints.folder / str(step)) for step in steps}
    averaged = [step for step in steps if saved[step].regular]
    if not averaged or not saved[steps[-1]].metadata.get("saved_as_best"):
        averaged = sorted({*averaged, steps[-1]})
    return averaged[-count:]


def weights_of(folder: Path) -> Record:
    """The record of the weights that were chosen when the training in `folder` ended."""
    return Record(folder / "weights.json", _REMEDY)


def _final(folder: Path, kept: list[int]) -> RunWeights | None:
    """The weights that were chosen when training ended, if it has."""
    record = weights_of(folder)
    content = record.read(steps=list)
    if not content:
        return None
    steps = content["steps"]
    if not steps or not set(steps) <= set(kept):
        raise CheckpointError(
            f"{record.path} names the weights of step {_list(steps)}, but the run keeps "
            f"{_list(kept)}: put the step back, or {_REMEDY}"
        )
    return RunWeights(folder, steps, content.get("tree", "params"))


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
