"""A task: the model that a run trains, its batches, its step, how it is evaluated and stopped."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jax.tree_util import Partial

from experiments.harness.runs.bootstrap import described_score, quantity
from experiments.harness.training import build
from experiments.harness.training.training_config import TrainingConfig
from jaxformer.distributed import CompiledStep, Strategy
from jaxformer.errors import ConfigError
from jaxformer.nn.axes import parameter_axes
from jaxformer.ops.masks import AnyArray
from jaxformer.text.data import Batches
from jaxformer.training import lora
from jaxformer.training.losses import Loss
from jaxformer.training.train_step import TrainState, init_train_state


class Sample(NamedTuple):
    """A source, what the model makes of it, and the reference."""

    source: str
    model: str
    reference: str


def sample_lines(samples: Sequence[Sample], width: int | None = 79) -> list[str]:
    """Three lines for each sample, none longer than `width`."""
    names = "source   ", "  model  ", "  right  "
    lines = (f"{name} {text}" for one in samples for name, text in zip(names, one, strict=True))
    return [f"{x[: width - 4]} ..." if width and len(x) > width else x for x in lines]


class EvaluationResult(NamedTuple):
    """Scores to log, and texts to show beside them."""

    scores: Mapping[str, float]
    """Numbers by their names, such as validation_loss."""
    samples: Sequence[Sample] = ()


class Cost(NamedTuple):
    """The cost of a step on a batch."""

    positions: int
    """Positions of the batch in which a token is predicted, padding included."""
    flops: int
    """FLOPs of the step by the model's equations."""


InitAndStep = tuple[Callable[[], TrainState], Any]
MakeStep = Callable[[Any, Any, Any, Strategy], InitAndStep]
"""(config, model, batch, devices) -> the function that makes the first state, and the step."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a run learns."""

    model: Any
    """The model; its parameters are those of the state."""
    make_step: MakeStep
    """Makes the first state, and the step that trains on `batches`."""
    batches: Batches
    evaluate: Callable[[Any, int], EvaluationResult] | None
    """(parameters, step) -> scores of the validation text; step 0: of what may be the result."""
    cost: Callable[[Any], Cost] | None = None
    """The cost of a step on a placed batch: the share of padding, and the utilization."""
    read_start: Callable[[Strategy], Any] | None = None
    """Reads the parameters that the run starts with, where they are not those of a run of the same
    model; those that they lack start anew, and None are random ones."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """What every checkpoint keeps besides the fingerprint of `batches`."""


def init_and_step(
    config: Any, model: Any, loss: Loss, inputs: Sequence[AnyArray], devices: Strategy
) -> tuple[Callable[[], TrainState], CompiledStep]:
    """The function that makes the first state of a run, and its compiled step.

    The step takes the gradient of the summed `loss`, divides it by the number of tokens and updates
    the parameters once. `inputs` are the arguments of `model`, of which two rows make the
    parameters. The program depends on neither seed nor learning rate: runs share it.
    """
    training = config.training
    axes = devices.axes or parameter_axes(model)
    rates = config.optimizer
    if training.lora_rank and hasattr(model, "backbone"):  # its head is new, and trained too
        rates = replace(rates, freeze=rf"^backbone/(?!pooler/)(?!.*{lora.ADAPTER})")
    loss, optimizer = build.build_trained(rates, training, loss, axes)

    def init(rng: jax.Array, dropout_rng: jax.Array, *inputs: jax.Array) -> TrainState:
        params = build.init_params(model, rng, *inputs)
        params = build.with_adapters(params, rng, training, axes)
        return init_train_state(params, optimizer, dropout_rng, ema=training.ema_decay > 0)

    step = devices.step(
        loss,
        optimizer,
        grad_accumulation=training.parts_on(devices),
        ema_decay=training.ema_decay,
        gather_at=training.gather_at,
        gather_dtype=config.model.dtype,
    )
    rngs = jax.random.split(jax.random.key(training.seed))
    return Partial(init, *rngs, *(leaf[:2] for leaf in inputs)), step


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
    """The metric that `training` names, or the first of `known`, those of every evaluation.

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


def due(step: int, interval: int) -> bool:
    """Whether what is done every `interval` steps (never, when 0) is done after `step`."""
    return interval > 0 and step % interval == 0
