"""The validation metric so far, kept with every checkpoint, and when it says to stop."""

from typing import NamedTuple

from jaxformer.checkpoint import Checkpoints
from jaxformer.distributed import assert_processes_agree
from jaxformer.errors import CheckpointError
from jaxformer.training.train_step import TrainState


class EarlyStopping(NamedTuple):
    """The last metric and its step, the least one, and evaluations since then.

    A smaller metric is better: a loss, or minus a score. None before the first evaluation.
    """

    metric: float | None = None
    step: int = 0
    best: float | None = None
    since_best: int = 0

    def update(self, metric: float, step: int) -> "EarlyStopping":
        """This after one more evaluation."""
        if self.best is None or metric < self.best:
            return EarlyStopping(metric, step, metric, 0)
        return EarlyStopping(metric, step, self.best, self.since_best + 1)

    def should_stop(self, patience: int) -> bool:
        """Whether the metric has not fallen for `patience` evaluations (never, when 0)."""
        return 0 < patience <= self.since_best

    def metric_at(self, step: int) -> float | None:
        """The metric of `step`, or None where it was not evaluated."""
        return self.metric if step == self.step else None


def restore_newest(
    checkpoints: Checkpoints, state: TrainState, fingerprint: str
) -> tuple[TrainState, EarlyStopping]:
    """The newest checkpoint's state and validation; `state` and none where there is no checkpoint.

    Raises `CheckpointError` when it was trained on batches of another `fingerprint`, `ConfigError`
    when several processes have other batches, or see other checkpoints, than each other.
    """
    steps = checkpoints.steps()
    assert_processes_agree({"batches": fingerprint, "checkpoints": steps})
    if not steps:
        return state, EarlyStopping()
    state, metadata = checkpoints.restore(state)
    assert_processes_agree({"step": int(state.step)})
    if metadata["data"] != fingerprint:
        raise CheckpointError(
            "the checkpoint was trained on other batches than these: the training text, the "
            "tokenizer or the settings of its batches have changed; use another --name"
        )
    return state, EarlyStopping(**metadata["early_stopping"])


def due(step: int, interval: int) -> bool:
    """Whether what is done every `interval` steps (never, when 0) is done after `step`."""
    return interval > 0 and step % interval == 0
