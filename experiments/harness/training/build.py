"""Parts that a run's settings name: model, attention, loss, optimizer, schedule, batches, loggers.

Everything that needs a run's model calls `build_model`, so that a run is validated, scored,
sampled, planned, fine-tuned and exported with what it was trained with.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from experiments.harness.runs import distributed
from experiments.harness.runs.loggers import Logger
from experiments.harness.training.experiment_config import ConfigWithBatches, ExperimentConfig
from experiments.harness.training.first_contact import AutoAttention, FirstContact
from experiments.harness.training.loss_options import nonzero_options
from experiments.harness.training.training_config import (
    OptimizerConfig,
    TrainingConfig,
)
from jaxformer.config import import_by_name, is_import_name
from jaxformer.errors import ConfigError
from jaxformer.nn.remat import REMAT
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn
from jaxformer.pretrained.model_specs import model_class
from jaxformer.text.data import Batches
from jaxformer.training import lora, optimizer
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import ModelAxes, freeze, freeze_gradient


def build_loggers(
    training: TrainingConfig, folder: Path, loggers: Iterable[Logger]
) -> list[Logger]:
    """`loggers`, and the ones that `training` names, each called with the run's `folder`.

    Only the first of several processes has them. Raises `ConfigError` for one without a method
    `log`, and for a class that ends the process.
    """
    if not distributed.is_first():
        return []
    made = [*loggers]
    for name in training.loggers:
        try:
            made.append(import_by_name(name, "loggers")(folder))
        except SystemExit as error:
            raise ConfigError(
                f"the logger {name} ends the process when it is made ({error}): what it needs, "
                "such as an account, is not there; leave it out of --training.loggers"
            ) from error
    for logger in made:
        if not callable(getattr(logger, "log", None)):
            raise ConfigError(
                f"the logger {type(logger).__name__} has no method log(step, metrics), so it would "
                "get nothing: give an object that has it"
            )
    return made


def build_batches(config: ConfigWithBatches, prepared: Any) -> Batches:
    """The batches that `config.data` names, made of (config, prepared), or `prepared`'s."""
    name = config.data.batches
    return import_by_name(name, "batches")(config, prepared) if name else prepared.batches


def build_model(
    config: ExperimentConfig, *, has_head: bool = False, contact: FirstContact | None = None
) -> Any:
    """The model of `config.model` with attention function and block of `config.training`.

    Its layers decide its class, or a model that `config.training` names. With `has_head` it is the
    one below a head. What it relies on of its devices is added to `contact`.
    """
    sizes, training = config.model, config.training
    kind: Any = model_class(sizes, has_head=has_head)
    if training.model:
        kind = import_by_name(training.model, "model")
    block = import_by_name(training.block, "block") if training.block else REMAT[training.remat]
    return kind(sizes, build_attention(training, contact), block)


def build_attention(training: TrainingConfig, contact: FirstContact | None = None) -> AttentionFn:
    """The attention function that `training` names; it adds what it relies on to `contact`."""
    name = training.attention_fn
    if name == "auto":
        return AutoAttention(FirstContact() if contact is None else contact)
    return ATTENTION_FNS[name] if name in ATTENTION_FNS else import_by_name(name, "attention_fn")


def build_loss(
    training: TrainingConfig, default: Callable[..., Loss], *, label_smoothing: float = 0.0
) -> Callable[..., Loss]:
    """The function that makes the loss of a model: the one that `training` names, or `default`.

    It gets `loss_chunk`, `z_loss`, `balance` and `label_smoothing` where they are not 0. Raises
    `ConfigError` for one that takes no such argument.
    """
    make_loss = import_by_name(training.loss, "loss") if training.loss else default
    options = {
        "loss_chunk": training.loss_chunk,
        "z_loss": training.z_loss,
        "balance": training.balance,
        "label_smoothing": label_smoothing,
    }
    return partial(make_loss, **nonzero_options(make_loss, options))


def build_trained(
    rates: OptimizerConfig,
    training: TrainingConfig,
    loss: Loss,
    axes: ModelAxes | None,
) -> tuple[Loss, optax.GradientTransformation]:
    """The loss and the optimizer of the parameters that `rates.freeze` does not match.

    With adapters, and without `rates.freeze`, they are the adapters' alone. A loss of the user's
    own, which may read parameters, gets the merged ones.
    """
    if training.lora_rank:
        rates = replace(rates, freeze=rates.freeze or lora.FROZEN)
        loss = lora.adapter_loss(loss, rates.freeze, None if training.loss else axes)
    elif rates.freeze:
        loss = freeze_gradient(loss, rates.freeze)
    return loss, build_optimizer(rates, axes=axes)


def build_optimizer(
    config: OptimizerConfig, *, axes: ModelAxes | None = None
) -> optax.GradientTransformation:
    """The optimizer of parameters with `axes`, and the schedule that `config` names."""
    if is_import_name(config.name):
        rule = import_by_name(config.name, "optimizer")(config, build_schedule(config))
        return freeze(rule, config.freeze) if config.freeze else rule
    return optimizer.make_optimizer(config, _custom_schedule(config), axes=axes)


def learning_rates(config: OptimizerConfig) -> Float[np.ndarray, " updates"]:
    """The learning rate of each of the `total_steps` updates."""
    return np.asarray(jax.vmap(build_schedule(config))(jnp.arange(config.total_steps)))


def build_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The schedule that `config` names."""
    return _custom_schedule(config) or optimizer.make_schedule(config)


def _custom_schedule(config: OptimizerConfig) -> optax.Schedule | None:
    if not is_import_name(config.schedule):
        return None
    return import_by_name(config.schedule, "schedule")(config)
