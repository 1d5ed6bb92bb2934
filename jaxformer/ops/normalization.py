"""The normalisation of LayerNorm and RMSNorm, with its derivative."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def normalize(x: Float[Array, "*shape D"], eps: float, centered: bool) -> Float[Array, "*shape D"]:
    """(x - mean) / sqrt(variance + eps) over the last axis; without the mean if not `centered`.

    The derivative is written out. With the automatic one, XLA on a CPU recomputes the residual sums
    of all later layers in each weight gradient, which costs time quadratic in depth.
    """
    return _normalize(x, eps, centered)[0]


@normalize.defjvp
def _normalize_jvp(eps, centered, primals, tangents):
    (x,), (dx,) = primals, tangents
    y, inverse = _normalize(x, eps, centered)
    dy = dx - y * jnp.mean(y * dx, axis=-1, keepdims=True)
    if centered:
        dy = dy - jnp.mean(dx, axis=-1, keepdims=True)
    return y, dy * inverse


def _normalize(x: jax.Array, eps: float, centered: bool) -> tuple[jax.Array, jax.Array]:
    """The normalised `x`, and the factor 1 / sqrt(variance + eps)."""
    if centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse, inverse
