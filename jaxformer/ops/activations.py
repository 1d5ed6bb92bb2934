"""Activations by name, and the soft cap of logits.

The plain twins of activations are `jax.nn.relu`, `jax.nn.gelu` and `jax.nn.silu`.
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
