"""Activations by name, their normalisation, and the soft cap of logits.

The plain twins of the activations are `jax.nn.relu`, `jax.nn.gelu` and `jax.nn.silu`.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x times the cumulative normal distribution of x (Hendrycks & Gimpel 2016), by erf.

    The error is below 1e-7 of x. `jax.nn.gelu` uses erfc, which is exact for large negative x and
    takes twice the time on a CPU.
    """
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}
"""The functions that `TransformerConfig.activation` names."""


def softcap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """cap * tanh(x / cap), which is near `x` for small `x` and never above `cap`; None: `x`.

    Gemma Team 2024 (Gemma 2), section 2.
    """
    return x if cap is None else cap * jnp.tanh(x / cap)


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
