"""Learning-rate schedules and the chain of gradient transformations."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxformer.config import ConfigError, check_least, check_names

Schedule = Literal["inverse_square_root", "cosine", "constant"]


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam (Kingma & Ba 2015) with the paper's settings; `clip_norm` and decay off at 0.

    `total_steps`: how many updates training makes; a cosine ends there, at `final_fraction` of
    `learning_rate`.
    """

    schedule: Schedule = "inverse_square_root"
    learning_rate: float = 7e-4
    warmup_steps: int = 4_000
    total_steps: int = 100_000
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-9
    clip_norm: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self):
        check_names(self)
        check_least(self, 0, "warmup_steps")
        if self.schedule == "cosine" and self.total_steps <= max(self.warmup_steps, 1):
            raise ConfigError(
                f"total_steps={self.total_steps} leaves a cosine nothing after warmup_steps="
                f"{self.warmup_steps}: give more steps or a shorter warm-up"
            )


def paper_learning_rate(d_model: int, warmup_steps: int) -> float:
    """The peak of the paper's schedule, d_model^-0.5 * warmup^-0.5 (section 5.3, equation 3)."""
    return (d_model * warmup_steps) ** -0.5


def inverse_square_root(peak: float, warmup_steps: int) -> optax.Schedule:
    """Update number n = 1, 2, ... is made at peak * min(n / warmup, sqrt(warmup / n)) (equation 3).

    An optax schedule counts the updates done before, n - 1.
    """

    def schedule(count):
        number = count + 1.0
        return peak * jnp.minimum(number / warmup_steps, jnp.sqrt(warmup_steps / number))

    return schedule


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate as a function of the number of updates done.

    All rise linearly to `learning_rate` at update number `warmup_steps`; a cosine ends at update
    number `total_steps`.
    """
    peak, warmup = config.learning_rate, max(config.warmup_steps, 1)
    if config.schedule == "inverse_square_root":
        return inverse_square_root(peak, warmup)
    if config.schedule == "cosine":
        final = peak * config.final_fraction
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.total_steps, final)
    else:
        schedule = optax.warmup_constant_schedule(0.0, peak, warmup)
    # Updates are numbered from 1: the first one is not made at rate 0.
    return lambda count: schedule(count + 1)


def decay_mask(params: Any) -> Any:
    """True for matrices and tables, False for biases and norm scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: str(path[-1].key) in ("kernel", "table"), params
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping by global norm, Adam, decoupled weight decay, learning rate: in this order."""
    parts = []
    if config.clip_norm > 0:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    parts.append(optax.scale_by_adam(config.b1, config.b2, config.eps))
    if config.weight_decay > 0:
        parts.append(optax.add_decayed_weights(config.weight_decay, decay_mask))
    parts.append(optax.scale_by_learning_rate(make_schedule(config)))
    return optax.chain(*parts)
