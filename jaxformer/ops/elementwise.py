"""Activations and norms. On a GPU the backward pass computes them again from their inputs.

Otherwise XLA for a GPU keeps what the forward pass has computed, such as tanh of a hidden layer and
normalised rows in float32: in GPT-2's training step it wrote and read a twentieth more.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def _recomputed_on_gpu(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function` of arrays, whose derivative on a GPU starts from these arrays."""

    def computed(*arrays: Array) -> Array:
        again = jax.checkpoint(function)
        return jax.lax.platform_dependent(*arrays, cuda=again, default=function)

    return computed


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x times the cumulative normal distribution of x (Hendrycks & Gimpel 2016), by erf.

    The error is below 1e-7 of x. `jax.nn.gelu` uses erfc, which is exact for large negative x and
    takes twice the time on a CPU.
    """
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": _recomputed_on_gpu(gelu),
    "gelu_tanh": _recomputed_on_gpu(partial(jax.nn.gelu, approximate=True)),
    "silu": _recomputed_on_gpu(jax.nn.silu),
}
"""The functions that `FeedForwardOptions.activation` names; their plain twins are jax.nn's."""


def norm(
    x: Float[Array, "*shape D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    eps: float,
    centered: bool,
) -> Float[Array, "*shape D"]:
    """`normalize(x, ...)` in float32, times `scale`, plus `bias`; in the type of `x`."""

    def of_rows(x: Array, scale: Array, *bias: Array) -> Array:
        y = normalize(x.astype(jnp.float32), eps, centered) * _as_row(scale, x.ndim)
        return sum((_as_row(b, x.ndim) for b in bias), y).astype(x.dtype)

    return _recomputed_on_gpu(of_rows)(x, scale, *([] if bias is None else [bias]))


def _as_row(vector: Float[Array, " D"], ndim: int) -> Float[Array, "*ones D"]:
    """`vector` with `ndim` axes, to be added to vectors [..., D]."""
    return jnp.expand_dims(vector, tuple(range(ndim - 1)))


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
