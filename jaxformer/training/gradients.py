"""The gradient of a loss and its sums, over parts of a batch, with the gradient noise scale.

Noise scale: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1. The square of a gradient over
n tokens is |G|^2 + tr(S) / n on average: G is the true gradient, S the covariance of a token's
gradient. The squares for the parts of a batch, which are those of gradient accumulation and of
devices, and that for the whole batch give estimates of both. tr(S) / |G|^2 is the number of tokens
in a batch from which on more of them help less.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Num

from jaxformer.errors import ConfigError
from jaxformer.training.losses import Loss
from jaxformer.training.parameters import Params

Batch = Any
"""Any pytree of arrays [B, ...] and scalars that the loss understands."""

Scalar = Num[jax.Array, ""]
Metrics = dict[str, Scalar]
LossSums = tuple[Scalar, Scalar, Metrics]
"""The sum of the loss, the number of tokens, and named auxiliary sums."""

CheckedLoss = Callable[[Params, Batch, jax.Array | None], LossSums]
"""A loss that always returns auxiliary sums."""

GradientSums = tuple[Params, Scalar, Scalar, Metrics]
"""The gradient of the summed loss, and `LossSums`: all of them sums over a batch."""

NOISE_METRICS = ("gradient_square", "gradient_noise", "gradient_noise_scale")
"""Estimates of |G|^2, of tr(S) and of their quotient. The quotient of one step is noisy: average
the first two over steps, then divide."""

STEP_METRICS = ("loss", "tokens", "grad_norm", "skipped", "consecutive_skips")

NOT_SUMS = ("grad_norm", "update_ratio", *NOISE_METRICS, "skipped", "consecutive_skips")
"""The metrics of a step that are not sums over its tokens."""

_NOISE_SUMS = ("_parts", "_part_squares", "_part_inverse_tokens")


def checked_loss(loss: Loss) -> CheckedLoss:
    """`loss` with auxiliary sums, {} if it has none; `TypeError` if it returns anything else."""

    def sums(params: Params, batch: Batch, rng: jax.Array | None) -> LossSums:
        returned = loss(params, batch, rng)
        if not _is_sums(returned):
            raise TypeError(
                f"the loss returned {_describe(returned)}, but it must return (sum in nats, number "
                "of tokens) or (sum in nats, number of tokens, {name: sum}), all of them scalars: "
                "return sums, not means; the step divides by the number of tokens"
            )
        total, tokens = returned[:2]
        auxiliary = returned[2] if len(returned) == 3 else {}
        taken = set(auxiliary) & {*STEP_METRICS, *NOT_SUMS}
        if taken:
            raise TypeError(
                f"the loss returned an auxiliary sum named {min(taken)!r}, which is a metric of "
                "the step itself: use another name"
            )
        return total, tokens, dict(auxiliary)

    return sums


def _is_sums(returned: Any) -> bool:
    """Whether `returned` has the form of `Sums`."""
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        return False
    named = returned[2] if len(returned) == 3 else {}
    return isinstance(named, Mapping) and all(map(_is_scalar, (*returned[:2], *named.values())))


def _is_scalar(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.number, float, int)) and jnp.ndim(x) == 0


def _describe(returned: Any) -> str:
    """The structure and the shapes of `returned`."""
    return str(jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", returned))


def loss_and_gradient(
    loss: CheckedLoss, params: Params, batch: Batch, rng: jax.Array | None
) -> GradientSums:
    """The gradient of the loss by `params`, and the sums of the loss."""

    def with_sums(params: Params) -> tuple[Scalar, tuple[Scalar, Metrics]]:
        total, tokens, auxiliary = loss(params, batch, rng)
        return total, (tokens, auxiliary)

    (total, (tokens, auxiliary)), grads = jax.value_and_grad(with_sums, has_aux=True)(params)
    return grads, total, tokens, auxiliary


def measured_loss_and_gradient(
    loss: CheckedLoss, params: Params, batch: Batch, rng: jax.Array | None
) -> GradientSums:
    """`loss_and_gradient`, with the auxiliary sums of which the noise scale is made."""
    return _with_part_sums(loss_and_gradient(loss, params, batch, rng))


def accumulate(
    sums_of: Callable[[Batch], GradientSums], params: Params, batch: Batch, parts: int
) -> GradientSums:
    """The sum of `sums_of(part)` over `parts` parts of the batch, one after the other.

    The gradients have the shapes and types of `params`.
    """
    if parts == 1:
        return sums_of(batch)

    def add(sums: Any, part: Batch) -> Any:
        *part_sums, auxiliary = sums_of(part)
        return jax.tree.map(jnp.add, sums, tuple(part_sums)), auxiliary

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    start = zeros, jnp.zeros(()), jnp.zeros(())
    sums, auxiliary = jax.lax.scan(add, start, jax.tree.map(lambda x: _split(x, parts), batch))
    return *sums, jax.tree.map(lambda x: x.sum(axis=0), auxiliary)


def _split(leaf: jax.Array, parts: int) -> jax.Array:
    """A leaf [B, ...] of a batch as [parts, B / parts, ...]; a scalar as [parts]."""
    if leaf.ndim == 0:
        return jnp.broadcast_to(leaf, (parts,))
    if leaf.shape[0] % parts:
        raise ConfigError(
            f"a batch of {leaf.shape[0]} rows does not divide into grad_accumulation={parts} equal "
            "parts: choose a divisor"
        )
    # A part has every parts-th row, so it is spread over all devices if the batch is.
    return leaf.reshape(-1, parts, *leaf.shape[1:]).swapaxes(0, 1)


def _with_part_sums(sums: GradientSums) -> GradientSums:
    """The sums of a part of a batch (`GradientSums`), with what `noise_metrics` needs of it."""
    grads, total, tokens, auxiliary = sums
    counts = (tokens > 0).astype(jnp.float32)
    inverse = counts / jnp.maximum(tokens, 1.0)
    of_part = counts, squared_norm(grads) * jnp.square(inverse), inverse
    return grads, total, tokens, auxiliary | dict(zip(_NOISE_SUMS, of_part, strict=True))


def noise_metrics(
    auxiliary: dict[str, Array], square: Float[Array, ""], tokens: Float[Array, ""]
) -> dict[str, Array]:
    """`auxiliary` with `NOISE_METRICS` in place of the sums that measuring added, if any.

    `square` is the squared norm of the mean gradient over all `tokens`.
    """
    if _NOISE_SUMS[0] not in auxiliary:
        return auxiliary
    others = {name: value for name, value in auxiliary.items() if name not in _NOISE_SUMS}
    parts, squares, inverse = (auxiliary[name] for name in _NOISE_SUMS)
    noise = (squares / parts - square) / (inverse / parts - 1.0 / tokens)
    signal = square - noise / tokens
    return others | dict(zip(NOISE_METRICS, (signal, noise, noise / signal), strict=True))


def squared_norm(grads: Any) -> Float[Array, ""]:
    """The sum of the squares of all elements."""
    # Not `optax.tree.norm`: it also squares imaginary parts, which doubles the operations.
    return jnp.asarray(optax.tree.sum(jax.tree.map(jnp.square, grads)))
