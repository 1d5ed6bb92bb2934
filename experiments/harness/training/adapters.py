"""Adapters (LoRA) of the weights that a run starts from: options, and what follows from them."""

import re
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import optax

from jaxformer.config import check_at_least, check_pattern
from jaxformer.training import lora
from jaxformer.training.losses import Loss
from jaxformer.training.optimizer import OptimizerConfig
from jaxformer.training.parameters import ModelAxes, flatten, freeze

R = TypeVar("R", bound=OptimizerConfig)


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters (LoRA) that are trained in place of the weights that a run starts from."""

    lora_rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    lora_alpha: float = 16.0
    """The adapters' product is multiplied by lora_alpha / lora_rank."""
    lora_targets: str = "blocks.*/kernel$"
    """Regular expression; matrices in whose path it is found get an adapter. Default: all of the
    blocks; (query|value)/kernel$ takes those of the paper."""

    def __post_init__(self):
        check_at_least(self, 0, "lora_rank", "lora_alpha")
        check_pattern(self, "lora_targets")


def with_adapters(params: Any, rng: jax.Array, options: LoraOptions, axes: ModelAxes) -> Any:
    """`params` with the adapters that `options` ask for, if any."""
    if not options.lora_rank:
        return params
    return lora.add_adapters(
        params,
        jax.random.fold_in(rng, 1),
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        targets=options.lora_targets,
        axes=axes,
    )


def with_lora(rates: R, options: LoraOptions) -> R:
    """`rates` for the adapters alone, if `options` ask for adapters."""
    return replace(rates, freeze=lora.FROZEN) if options.lora_rank else rates


def train_adapters(
    loss: Loss, optimizer: optax.GradientTransformation, frozen: str = lora.FROZEN
) -> tuple[Loss, optax.GradientTransformation]:
    """Loss and optimizer of parameters with adapters, of which those that `frozen` finds stay."""
    return lora.adapter_loss(loss, frozen), freeze(optimizer, frozen)


def describe_size(params: Any) -> str:
    """The number of parameters, and how many of them are trained in adapters."""
    sizes = {path: leaf.size for path, leaf in flatten(params).items()}
    trained = sum(size for path, size in sizes.items() if re.search(lora.ADAPTER, path))
    said = f"{sum(sizes.values()):,} parameters"
    return f"{said}, {trained:,} of them trained in adapters" if trained else said
