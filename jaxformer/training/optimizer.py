"""Learning-rate schedules and the chain of gradient transformations."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxformer.config import Checked, Count, Natural, NonNegative, Regex, UnitInterval
from jaxformer.errors import ConfigError
from jaxformer.training.muon import CoefficientsName, scale_by_muon
from jaxformer.training.parameters import ModelAxes, axes_of, freeze, map_with_path

ScheduleName = Literal["inverse_square_root", "cosine", "constant", "linear", "wsd"]
OptimizerName = Literal["adam", "muon", "lion"]


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """The settings of `make_optimizer`; the defaults follow Vaswani et al. 2017.

    >>> config = jf.OptimizerConfig(name="muon", schedule="cosine", total_steps=5000)
    >>> config.learning_rate, config.warmup_steps
    (0.0007, 4000)
    """

    schedule: ScheduleName = "inverse_square_root"
    """Course of the learning rate after the warm-up."""
    name: OptimizerName = "adam"
    """The update rule; adam with `weight_decay` is AdamW."""
    learning_rate: NonNegative = 7e-4
    """The peak learning rate, reached at the end of the warm-up."""
    warmup_steps: Natural = 4_000
    """Number of steps in which the learning rate rises linearly from 0."""
    total_steps: Count = 100_000
    """Number of training steps. A cosine, linear or wsd schedule ends there."""
    min_lr_ratio: NonNegative = 0.1
    """Final learning rate of a cosine, linear or wsd schedule, as a fraction of `learning_rate`."""
    decay_fraction: UnitInterval = 0.2
    """Share of all steps in which a wsd schedule falls linearly at the end; before, it is flat."""
    b1: UnitInterval = 0.9
    """Decay of Adam's first moment; weight of the momentum in Lion's update."""
    b2: UnitInterval = 0.98
    """Decay of Adam's second moment and of Lion's momentum."""
    eps: NonNegative = 1e-9
    """Added to the denominator of Adam."""
    grad_clip_norm: NonNegative = 0.0
    """Largest global norm of the gradient; larger ones are scaled down. 0 disables clipping."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of matrices and tables. 0 disables it."""
    momentum: UnitInterval = 0.95
    """Momentum of Muon."""
    ns_coeffs: CoefficientsName = "standard"
    """Coefficients of Muon's five Newton-Schulz iterations, by optax's names. The singular values
    of an update are 0.68 to 1.21 by standard (Jordan 2024), 0.97 to 1.15 by dion (Ahn et al. 2025),
    0.87 to 1.13 by polar_express (Amsel et al. 2025); all cost the same."""
    freeze: Regex = ""
    """Regular expression; parameters whose path it matches are not trained. Empty: none."""

    def __post_init__(self) -> None:
        if str(self.name).lower() == "adamw":
            raise ConfigError(
                f"name={self.name!r} is adam here, whose weight_decay is decoupled as AdamW's: "
                "give name='adam' and a weight_decay above 0, such as 0.01"
            )
        super().__post_init__()
        decay = self.decay_steps - 1 if self.schedule == "wsd" else 0
        is_endless = self.schedule not in ("cosine", "linear", "wsd")
        if not is_endless and self.total_steps <= max(self.warmup_steps, 1) + decay:
            raise ConfigError(
                f"total_steps={self.total_steps} leaves no step for the {self.schedule} after "
                f"warmup_steps={self.warmup_steps}: give more steps or a shorter warm-up"
            )

    @property
    def decay_steps(self) -> int:
        """The number of steps in which a wsd schedule falls."""
        return max(round(self.decay_fraction * self.total_steps), 1)


def noam_peak_learning_rate(d_model: int, warmup_steps: int) -> float:
    """The peak d_model^-0.5 * warmup^-0.5 of the schedule of Vaswani et al. 2017, equation 3."""
    return (d_model * warmup_steps) ** -0.5


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate as a function of the number of updates done.

    It rises linearly to `learning_rate` at update number `warmup_steps`. The inverse square root
    follows Vaswani et al. 2017, equation 3. A cosine, linear or wsd schedule (warm-up, stable,
    decay: Hu et al. 2024; Hägele et al. 2024) ends at update number `total_steps`.

    >>> schedule = make_schedule(jf.OptimizerConfig(learning_rate=1.0, warmup_steps=10))
    >>> [round(float(schedule(updates)), 4) for updates in (4, 9, 39)]  # 5 / 10, 1, (10 / 40)^0.5
    [0.5, 1.0, 0.5]
    """
    relative = _relative_schedule(config)
    return lambda count: config.learning_rate * relative(count)


def _relative_schedule(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate divided by its peak, as a function of the number of updates done."""
    warmup, total = max(config.warmup_steps, 1), config.total_steps
    if config.schedule == "inverse_square_root":
        return lambda count: jnp.minimum((count + 1) / warmup, jnp.sqrt(warmup / (count + 1)))
    if config.schedule == "cosine":
        schedule = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, total, config.min_lr_ratio)
    elif config.schedule == "constant":
        schedule = optax.warmup_constant_schedule(0.0, 1.0, warmup)
    else:
        rise = optax.linear_schedule(0.0, 1.0, warmup)
        decay = total - warmup if config.schedule == "linear" else config.decay_steps
        fall = optax.linear_schedule(1.0, config.min_lr_ratio, decay)
        schedule = optax.join_schedules([rise, fall], [total - decay])
    # The first update has number 1, so its rate is not 0.
    return lambda count: schedule(count + 1)


def make_optimizer(
    config: OptimizerConfig,
    schedule: optax.Schedule | None = None,
    *,
    axes: ModelAxes | None = None,
) -> optax.GradientTransformation:
    """An optimizer that clips by global norm, applies the rule, the weight decay and the rate.

    `axes`, from `parameter_axes(model)`, say which parameters are matrices and which of their
    axes are inputs. Weight decay and "muon" read them; without them a parameter with two dimensions
    is a matrix [inputs, outputs], and one with more is refused.

    `schedule` takes the place of `make_schedule(config)`. Without one, `init` writes the peak
    learning rate into the state, where `update` reads it: one compiled step serves all rates, and a
    restored state keeps the rate that it was saved with (`with_learning_rate` sets another).

    The update rules:

    - "adam": Kingma & Ba 2015.
    - "lion": Chen et al. 2023, algorithm 2.
    - "muon": Jordan 2024 for hidden matrices (`Axes.is_hidden`), Adam for all other parameters.
      Muon's updates have the size of Adam's, a root mean square of 0.2 (Liu et al. 2025, eq. 4).

    For `config.freeze` see `freeze`. Raises `ConfigError` for "muon" without `axes`.

    >>> config = jf.OptimizerConfig(schedule="constant", learning_rate=0.1, warmup_steps=0)
    >>> optimizer, params = jf.make_optimizer(config), {"scale": jnp.array([1.0, 1.0])}
    >>> gradient = {"scale": jnp.array([5.0, -0.01])}
    >>> updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    >>> [round(update, 4) for update in updates["scale"].tolist()]  # Adam's first update
    [-0.1, 0.1]
    """
    rule = optax.scale_by_adam(config.b1, config.b2, config.eps)
    if config.name == "lion":
        rule = optax.scale_by_lion(config.b1, config.b2)
    elif config.name == "muon":
        if axes is None:
            raise ConfigError(
                "name='muon' depends on the blocks of the model: give "
                "axes=jf.parameter_axes(model, *inputs)"
            )
        rule = _muon(config.momentum, config.ns_coeffs, axes, rule)
    parts = [rule]
    if config.grad_clip_norm > 0:
        parts.insert(0, optax.clip_by_global_norm(config.grad_clip_norm))
    if config.weight_decay > 0:

        def is_matrix(path: str, leaf: jax.Array) -> bool:  # or a table: it has inputs
            return bool(axes_of(path, leaf, axes).inputs)

        mask = partial(map_with_path, is_matrix)
        parts.append(optax.add_decayed_weights(config.weight_decay, mask))
    if schedule is None:
        scale = optax.inject_hyperparams(_scale_by_peak, "relative", jnp.float32)
        parts.append(scale(config.learning_rate, relative=_relative_schedule(config)))
    else:
        parts.append(optax.scale_by_learning_rate(schedule))
    optimizer = optax.chain(*parts)
    return freeze(optimizer, config.freeze) if config.freeze else optimizer


def _scale_by_peak(learning_rate: Any, relative: optax.Schedule) -> optax.GradientTransformation:
    """Scales updates by -learning_rate * relative(number of updates).

    `inject_hyperparams` keeps the learning rate in the state.
    """
    return optax.scale_by_schedule(lambda count: -learning_rate * relative(count))


def _muon(
    momentum: float,
    ns_coeffs: CoefficientsName,
    axes: ModelAxes,
    default_rule: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Muon for hidden matrices, `default_rule` for all other parameters."""

    def label(path: str, leaf: jax.Array) -> str:
        return "muon" if axes_of(path, leaf, axes).is_hidden else "default"

    def scale(path: str, leaf: jax.Array) -> jax.Array:
        """The orthogonal update of R inputs and C outputs, times 0.2 sqrt(max(R, C))."""
        sizes = axes_of(path, leaf, axes).matrix_shape(leaf.shape)
        return 0.2 * math.sqrt(max(sizes)) * leaf

    scaled = optax.stateless(lambda updates, params=None: map_with_path(scale, updates))
    rules: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.chain(scale_by_muon(momentum, axes, ns_coeffs), scaled),
        "default": default_rule,
    }
    return optax.partition(rules, partial(map_with_path, label))
