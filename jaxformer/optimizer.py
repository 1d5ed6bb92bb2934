"""Learning-rate schedules and the chain of gradient transformations."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxformer.config import ConfigError, check_least, check_names, check_share

Schedule = Literal["inverse_square_root", "cosine", "constant"]


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam (Kingma & Ba 2015) with the paper's settings; `clip_norm` and decay off at 0.

    `total_steps`: how many updates training makes; a cosine ends there, at `final_fraction` of
    `learning_rate`. `name`: the rule of `make_optimizer`; `b1` and `b2` are Adam's and Lion's,
    `eps` Adam's, `momentum` Muon's.
    """

    schedule: Schedule = "inverse_square_root"
    name: Literal["adam", "muon", "lion", "adafactor"] = "adam"
    learning_rate: float = 7e-4
    warmup_steps: int = 4_000
    total_steps: int = 100_000
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.98
    eps: float = 1e-9
    clip_norm: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.95

    def __post_init__(self):
        check_names(self)
        check_least(self, 0, "learning_rate", "warmup_steps", "final_fraction")
        check_least(self, 0, "eps", "clip_norm", "weight_decay")
        check_share(self, "b1", "b2", "momentum")
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
    """Clipping by global norm, the rule, decoupled weight decay, learning rate: in this order.

    The rule is Adam's; Lion's (Chen et al. 2023, algorithm 2); Adafactor's without momentum, in
    which a rate is a share of each parameter's own size (Shazeer & Stern 2018, algorithm 5); or
    Muon's (Jordan 2024) for the kernels of the blocks, in updates as large as Adam's (0.2 root
    mean square; Liu et al. 2025, equation 4), and Adam's for everything else.
    """
    parts = []
    if config.clip_norm > 0:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    parts.append(_RULES[config.name](config))
    if config.weight_decay > 0:
        parts.append(optax.add_decayed_weights(config.weight_decay, decay_mask))
    parts.append(optax.scale_by_learning_rate(make_schedule(config)))
    return optax.chain(*parts)


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.b1, config.b2, config.eps)


def _lion(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.b1, config.b2)


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    muon = optax.contrib.scale_by_muon(
        beta=config.momentum, weight_dimension_numbers=_map_leaves(_matrix_axes)
    )
    rules = {"muon": optax.chain(muon, optax.stateless(_as_large_as_adam)), "adam": _adam(config)}
    return optax.partition(rules, _map_leaves(_muon_or_adam))


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    rule = optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )

    # Factored are the two longest axes: of [D, N, H], not the two of the matrix it stands for.
    def init(params):
        return rule.init(_flat(params))

    def update(updates, state, params):
        flat, state = rule.update(_flat(updates), state, _flat(params))
        return jax.tree.map(lambda new, old: new.reshape(old.shape), flat, updates), state

    return optax.GradientTransformation(init, update)


_RULES = {"adam": _adam, "muon": _muon, "lion": _lion, "adafactor": _adafactor}


def _map_leaves(function: Callable[[Any, jax.Array], Any]) -> Callable[[Any], Any]:
    return lambda tree: jax.tree_util.tree_map_with_path(function, tree)


def _matrix_axes(path: Any, kernel: jax.Array) -> optax.contrib.MuonDimensionNumbers:
    """The axes that a kernel sums over, and the others.

    The first, as in a query's [D, N, H]; heads and their features in an attention's out [N, H, D].
    """
    count = kernel.ndim - 1 if path[-2].key == "out" else 1
    axes = tuple(range(kernel.ndim))
    return optax.contrib.MuonDimensionNumbers(axes[:count], axes[count:])


def _muon_or_adam(path: Any, leaf: jax.Array) -> str:
    inside = any(str(part.key).startswith("blocks_") for part in path)
    return "muon" if inside and path[-1].key == "kernel" else "adam"


def _as_large_as_adam(updates: Any, params: Any = None) -> Any:
    """Orthogonal matrices of R inputs and C outputs, times 0.2 sqrt(max(R, C))."""

    def scale(path, leaf):
        return 0.2 * math.sqrt(max(_matrix_shape(path, leaf))) * leaf

    return _map_leaves(scale)(updates)


def _matrix_shape(path: Any, kernel: jax.Array) -> tuple[int, int]:
    axes = _matrix_axes(path, kernel)
    return tuple(math.prod(kernel.shape[i] for i in group) for group in axes)


def _flat(tree: Any) -> Any:
    """`tree` with its kernels as matrices [inputs, outputs]."""

    def flatten(path, leaf):
        return leaf.reshape(_matrix_shape(path, leaf)) if path[-1].key == "kernel" else leaf

    return _map_leaves(flatten)(tree)
