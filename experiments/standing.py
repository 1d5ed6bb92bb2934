"""How training stands: the validation metric so far, kept with every checkpoint."""

from typing import NamedTuple

from jaxformer.checkpoint import CheckpointError, Checkpoints
from jaxformer.parallel import agree
from jaxformer.training import TrainState


class Standing(NamedTuple):
    """Validation so far: the last metric and its step, the least, and evaluations since then.

    The metric is to be small: a loss, or minus a score. None before the first evaluation.
    """

    metric: float | None = None
    step: int = 0
    best: float | None = None
    since_best: int = 0

    def after(self, metric: float, step: int) -> "Standing":
        """The standing after one more evaluation."""
        if self.best is None or metric < self.best:
            return Standing(metric, step, metric, 0)
        return Standing(metric, step, self.best, self.since_best + 1)

    def tired(self, patience: int) -> bool:
        """Whether the metric has not fallen for `patience` evaluations (never, when 0)."""
        return 0 < patience <= self.since_best

    def metric_of(self, step: int) -> float | None:
        """What `Checkpoints` shall minimise for `step`: its metric, if it was evaluated."""
        return self.metric if step == self.step else None


def resumed(
    checkpoints: Checkpoints, state: TrainState, fingerprint: str
) -> tuple[TrainState, Standing]:
    """The newest checkpoint's state and standing; `state` and a new standing where there is none.

    Raises `CheckpointError` when it was trained on batches of another `fingerprint`, `ConfigError`
    when several processes have other batches, or see other checkpoints, than each other.
    """
    steps = checkpoints.steps()
    agree({"batches": fingerprint, "checkpoints": steps})
    if not steps:
        return state, Standing()
    state, facts = checkpoints.restore(state)
    agree({"step": int(state.step)})
    if facts["data"] != fingerprint:
        raise CheckpointError(
            "the checkpoint was trained on other batches than these: the training text, the "
            "tokenizer or the settings of its batches have changed; use another --name"
        )
    return state, Standing(**facts["standing"])


def due(step: int, interval: int) -> bool:
    """Whether what is done every `interval` steps (never, when 0) is done after `step`."""
    return interval > 0 and step % interval == 0
