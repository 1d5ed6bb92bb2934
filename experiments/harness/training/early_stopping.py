"""Early stopping: the score that is watched, and its course."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.harness.runs.quantities import described_score, quantity
from experiments.harness.training.training_config import TrainingConfig
from jaxformer.errors import ConfigError


class EarlyStopping(NamedTuple):
    """The last metric and its step, the least one, and evaluations since then.

    A smaller metric is better: a loss, or minus a score. None before the first evaluation, and for
    a metric that is not finite, which is never the best.
    """

    metric: float | None = None
    step: int = 0
    best: float | None = None
    since_best: int = 0

    def update(self, metric: float, step: int) -> "EarlyStopping":
        """This after one more evaluation."""
        if not math.isfinite(metric):
            return EarlyStopping(None, step, self.best, self.since_best + 1)
        if self.best is None or metric < self.best:
            return EarlyStopping(metric, step, metric, 0)
        return EarlyStopping(metric, step, self.best, self.since_best + 1)

    def should_stop(self, patience: int) -> bool:
        """Whether the metric has not fallen for `patience` evaluations (never, when 0).

        A best of 0, the BLEU of a model that has not yet learned words, says nothing.
        """
        return 0 < patience <= self.since_best and self.best != 0

    def metric_at(self, step: int) -> float | None:
        """The metric of `step`, or None where it was not evaluated."""
        return self.metric if step == self.step else None

    def is_best(self, step: int) -> bool:
        """Whether `step` was the last to be evaluated, and is the best."""
        return step == self.step and self.best is not None and self.since_best == 0


class StoppingMetric(NamedTuple):
    """The score that early stopping watches; `sign` is 1 where less is better, else -1."""

    name: str
    sign: float

    def of(self, scores: Mapping[str, float]) -> float:
        """The score of an evaluation, negated where more is better.

        Raises `ConfigError` where the evaluation has no such score.
        """
        if self.name not in scores:
            raise ConfigError(
                f"early_stopping_metric={self.name!r}, but an evaluation of this run gives "
                f"{', '.join(scores)}: give one of these"
            )
        return self.sign * scores[self.name]

    def describe_best(self, stopping: EarlyStopping) -> str:
        """The best score so far, such as "best loss 1.2345" or "best chrF 61.23"."""
        if stopping.best is None:
            return f"no finite {quantity(self.name.removeprefix('validation_')).label} yet"
        return f"best {described_score(self.name, self.sign * stopping.best)}"


def stopping_metric(training: TrainingConfig, known: Sequence[str]) -> StoppingMetric:
    """The metric that `training` names, or the first of `known`, the scores of every evaluation.

    Raises `ConfigError` for another name, unless your own loss or metric may give it, and for one
    of which neither its name nor `training.early_stopping_mode` tells whether less or more is
    better.
    """
    name = training.early_stopping_metric or known[0]
    if name not in known and not training.loss and not training.metrics:
        raise ConfigError(
            f"early_stopping_metric={name!r} is unknown: give one of {', '.join(known)}"
        )
    modes = {"min": "lower", "max": "higher", "auto": quantity(name).better}
    better = modes[training.early_stopping_mode]
    if not better:
        raise ConfigError(
            f"early_stopping_metric={name!r}: its name does not tell whether less or more is "
            "better: give --training.early_stopping_mode min or max"
        )
    return StoppingMetric(name, 1.0 if better == "lower" else -1.0)
