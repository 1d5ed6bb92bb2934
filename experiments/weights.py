"""Which checkpoints of a run make its weights: the mean of the last ones, or the best one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from experiments import notes
from experiments.settings import TrainingConfig
from jaxformer.checkpoint import CheckpointError, Checkpoints
from jaxformer.config import ConfigError
from jaxformer.int8 import Int8, quantize

_NOTE = "weights.json"

_Trained = TypeVar("_Trained", bound=NamedTuple)


class Chosen(NamedTuple):
    """The weights of a run: the mean of those of `steps`, and the metric they were chosen by."""

    params: Any
    steps: list[int]
    metric: float


def choose(
    checkpoints: Checkpoints, training: TrainingConfig, metric: Callable[[Any, list[int]], float]
) -> Chosen:
    """The mean of the last `training.average` checkpoints, or the best one alone.

    Taken is what has the least metric(params, steps), the mean of two that are equal.
    """
    # Without those of an interruption, so that a resumed run averages what another one does.
    every, complete = max(training.save_every, 1), checkpoints.steps()
    regular = [step for step in complete[:-1] if step % every == 0] + complete[-1:]
    last = regular[-training.average :]
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
    """Writes down that the run's weights are the mean of those of `steps`, and their scores."""
    notes.write(folder / _NOTE, {"steps": steps, **scores})


def load(folder: Path, training: TrainingConfig) -> Any:
    """The weights of the run in `folder`: those chosen at its end while they last, or its newest.

    Raises `CheckpointError` where there is no complete checkpoint, `DataError` where the note of
    those chosen is damaged.
    """
    checkpoints = Checkpoints(folder / "checkpoints")
    newest = checkpoints.newest_step()
    if newest is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint: train first")
    said = notes.read(folder / _NOTE, {"steps": list}, "remove it to use the newest checkpoint")
    chosen = said["steps"] if said else []
    # A run that goes on after its end prunes what was chosen then.
    steps = chosen if chosen and set(chosen) <= set(checkpoints.steps()) else [newest]
    return mean(checkpoints, training, steps)


def in_int8(trained: _Trained) -> _Trained:
    """`trained`, with its `model` and `params` in 8 bits."""
    return trained._replace(model=Int8(trained.model), params=quantize(trained.params))


def check_folder(folder: Path) -> None:
    """Raises `ConfigError` unless `folder` is one."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give --run the folder of a trained run")
