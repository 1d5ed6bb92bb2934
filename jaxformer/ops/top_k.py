"""The largest numbers of each row, such as the likeliest tokens of a vocabulary."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int32, Real

_CHUNK = 128


def top_k(x: Real[Array, "*R V"], count: int) -> tuple[Real[Array, "*R k"], Int32[Array, "*R k"]]:
    """The `count` largest numbers of each row, largest first, and their indices.

    The plain twin is `jax.lax.top_k`. Both give the same result: of equal numbers the first ones.
    On a CPU this function takes about a quarter of the time for a few numbers of a vocabulary. On
    other platforms it calls `jax.lax.top_k` with a matrix, which a TPU's compiler computes without
    a sort; with more axes it sorts.
    """
    size = x.shape[-1]
    rows = x.reshape(-1, size)

    def plain(rows: Array) -> tuple[Array, Array]:
        values, indices = jax.lax.top_k(rows, count)
        return values, indices

    if size <= 2 * count * _CHUNK:
        values, indices = plain(rows)
    else:
        in_chunks = partial(_top_k_in_chunks, count=count)
        values, indices = jax.lax.platform_dependent(rows, cpu=in_chunks, default=plain)
    shape = *x.shape[:-1], count
    return values.reshape(shape), indices.reshape(shape)


def _top_k_in_chunks(
    x: Real[Array, "R V"], count: int
) -> tuple[Real[Array, "R k"], Int32[Array, "R k"]]:
    """`jax.lax.top_k`, searching only the `count` chunks of each row with the largest maxima."""
    chunks = -(-x.shape[1] // _CHUNK)
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min
    padding = ((0, 0), (0, chunks * _CHUNK - x.shape[1]))
    x = jnp.pad(x, padding, constant_values=lowest).reshape(-1, chunks, _CHUNK)
    _, chosen = jax.lax.top_k(x.max(axis=2), count)
    chosen = jnp.sort(chosen, axis=1)  # among equal numbers the first one is chosen
    candidates = jnp.take_along_axis(x, chosen[:, :, None], axis=1)
    values, position = jax.lax.top_k(candidates.reshape(-1, count * _CHUNK), count)
    chunk = jnp.take_along_axis(chosen, position // _CHUNK, axis=1)
    return values, chunk * _CHUNK + position % _CHUNK
