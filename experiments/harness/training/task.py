"""A task: the model that a run trains, its batches, its step, and how it is evaluated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
from jax.tree_util import Partial

from experiments.harness.training import build
from jaxformer.distributed import CompiledStep, Strategy
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
