"""The gradient noise scale of McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.

The square of a gradient over n tokens is |G|^2 + tr(S) / n on average: G is the true gradient, S
the covariance of a token's gradient. The squares for the parts of a batch, which are those of
gradient accumulation and of devices, and that for the whole batch give estimates of both.
tr(S) / |G|^2 is the number of tokens in a batch from which on more of them help less.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

METRICS = ("gradient_square", "gradient_noise", "gradient_noise_scale")
"""Estimates of |G|^2, of tr(S) and of their quotient. The quotient of one step is noisy: average
the first two over steps, then divide."""

_SUMS = ("_parts", "_part_squares", "_part_inverse_tokens")


def with_part_sums(sums: Any) -> Any:
    """The sums of a part of a batch (`GradientSums`), with what `noise_metrics` needs of it."""
    grads, total, tokens, auxiliary = sums
    counts = (tokens > 0).astype(jnp.float32)
    inverse = counts / jnp.maximum(tokens, 1.0)
    found = counts, squared_norm(grads) * jnp.square(inverse), inverse
    return grads, total, tokens, auxiliary | dict(zip(_SUMS, found, strict=True))


def noise_metrics(
    auxiliary: dict[str, Array], square: Float[Array, ""], tokens: Float[Array, ""]
) -> dict[str, Array]:
    """`auxiliary` with `METRICS` in place of the sums that `with_part_sums` added, if it did.

    `square` is the squared norm of the mean gradient over all `tokens`.
    """
    if _SUMS[0] not in auxiliary:
        return auxiliary
    rest = {name: value for name, value in auxiliary.items() if name not in _SUMS}
    parts, squares, inverse = (auxiliary[name] for name in _SUMS)
    noise = (squares / parts - square) / (inverse / parts - 1.0 / tokens)
    signal = square - noise / tokens
    return rest | dict(zip(METRICS, (signal, noise, noise / signal), strict=True))


def squared_norm(grads: Any) -> Float[Array, ""]:
    """The sum of the squares of all elements."""
    # Not `optax.tree.norm`: it also squares imaginary parts, which doubles the operations.
    return jnp.asarray(optax.tree.sum(jax.tree.map(jnp.square, grads)))
