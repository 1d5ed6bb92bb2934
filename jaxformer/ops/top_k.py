"""`jax.lax.top_k` for a few of a vocabulary."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32, Real

_CHUNK = 128


def top_k(x: Real[Array, "*R V"], count: int) -> tuple[Real[Array, "*R k"], Int32[Array, "*R k"]]:
    """The `count` largest numbers of each row, largest first, and their indices.

    The plain twin is `jax.lax.top_k`: both give the same result, of equal numbers those that come
    first. This one takes about a quarter of the time for a few numbers of a vocabulary: only the
    chunks with the `count` largest maxima can hold one of them, and only these are searched.
    """
    chunks = -(-x.shape[-1] // _CHUNK)
    if chunks <= 2 * count:
        return jax.lax.top_k(x, count)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, chunks * _CHUNK - x.shape[-1])]
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min
    x = jnp.pad(x, padding, constant_values=lowest).reshape(*x.shape[:-1], chunks, _CHUNK)
    _, chosen = jax.lax.top_k(x.max(axis=-1), count)
    chosen = jnp.sort(chosen, axis=-1)  # so that of equal numbers the first one wins
    candidates = jnp.take_along_axis(x, chosen[..., None], axis=-2)
    values, found = jax.lax.top_k(candidates.reshape(*x.shape[:-2], -1), count)
    chunk = jnp.take_along_axis(chosen, found // _CHUNK, axis=-1)
    return values, chunk * _CHUNK + found % _CHUNK
