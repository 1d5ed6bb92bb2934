"""Which checkpoints become a run's final weights: the mean of the last ones, or the best one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from experiments.harness import json_records
from experiments.harness.training_config import TrainingConfig
from jaxformer.checkpoint import Checkpoints
from jaxformer.errors import CheckpointError, ConfigError
from jaxformer.nn.int8 import Int8, quantize

_NOTE = "weights.json"

_Loaded = TypeVar("_Loaded", bound=NamedTuple)


class Chosen(NamedTuple):
    """The final weights, the `steps` whose mean they are, and the metric they were chosen by."""

    params: Any
    steps: list[int]
    metric: float


def choose(
    checkpoints: Checkpoints, training: TrainingConfig, metric: Callable[[Any, list[int]], float]
) -> Chosen:
    """The mean of the last `training.average_checkpoints` checkpoints, or the best one alone.

    The one with the smaller metric(params, steps) wins; the mean wins a tie.
    """
    # Checkpoints saved on preemption are not candidates: a resumed run averages the same steps.
    every, complete = max(training.save_every, 1), checkpoints.steps()
    regular = [step for step in complete[:-1] if step % every == 0] + complete[-1:]
    last = regular[-training.average_checkpoints :]
    best = checkpoints.best_step()
    candidates = [last] if best is None or last == [best] else [last, [best]]
    found = []
    for steps in candidates:
        params = mean(checkpoints, training, steps)
        found.append(Chosen(params, steps, metric(params, steps)))
    return min(found, key=lambda chosen: chosen.metric)


def mean(checkpoints: Checkpoints, training: TrainingConfig, steps: list[int]) -> Any:
    """The mean over `steps` of the parameters, or of their moving averages if there are any."""
    tree = "ema" if training.ema_decay > 0 else "params"
    return checkpoints.average_params(steps, tree=tree)


def note(folder: Path, steps: list[int], **scores: float) -> None:
    """Records that the final weights are the mean of those of `steps`, and their scores."""
    json_records.write(folder / _NOTE, {"steps": steps, **scores})


def load(folder: Path, training: TrainingConfig) -> Any:
    """The weights of the run in `folder`: those chosen at its end, or those of its newest step.

    Raises `CheckpointError` where there is no complete checkpoint, `DataError` where the record of
    the choice is damaged.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    newest = checkpoints.newest_step()
    if newest is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint: train first")
    said = json_records.read(
        folder / _NOTE, {"steps": list}, "remove it to use the newest checkpoint"
    )
    chosen = said["steps"] if said else []
    # A run that is continued after its end may have deleted the checkpoints chosen then.
    steps = chosen if chosen and set(chosen) <= set(checkpoints.steps()) else [newest]
    return mean(checkpoints, training, steps)


def in_int8(loaded: _Loaded) -> _Loaded:
    """`loaded` with its `model` and `params` in 8 bits."""
    run: Any = loaded
    return run._replace(model=Int8(run.model), params=quantize(run.model, run.params))


def check_folder(folder: Path) -> None:
    """Raises `ConfigError` unless `folder` is one."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give --run the folder of a trained run")
