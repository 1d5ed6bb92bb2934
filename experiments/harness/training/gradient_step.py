"""The step of a run by the gradient of a loss, and the first state that it takes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.tree_util import Partial

from experiments.harness.training import build, parameters
from experiments.harness.training.experiment_config import ExperimentConfig
from experiments.harness.training.task import InitAndStep
from jaxformer.distributed import Strategy
from jaxformer.nn.axes import parameter_axes
from jaxformer.ops.masks import AnyArray
from jaxformer.training import lora
from jaxformer.training.losses import Loss
from jaxformer.training.train_step import TrainState, init_train_state


def gradient_step(
    config: ExperimentConfig, model: Any, loss: Loss, inputs: Sequence[AnyArray], devices: Strategy
) -> InitAndStep:
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
        params = parameters.init_params(model, rng, *inputs)
        params = parameters.with_adapters(params, rng, training, axes)
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
