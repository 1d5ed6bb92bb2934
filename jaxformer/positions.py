"""Where a token stands: the sinusoidal table, rotary turning, ALiBi slopes, relative buckets."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import SinusoidalLayout


def sinusoidal_positions(
    length: int, d_model: int, layout: SinusoidalLayout = "interleaved"
) -> np.ndarray:
    """The table [length, d_model] float32 of Vaswani et al. 2017, section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos of the same angle; with an
    odd `d_model` the last column is a sine without its cosine. The layout "halves" puts all sines
    before all cosines, as Marian does (Junczys-Dowmunt et al. 2018).
    """
    column = np.arange(d_model)
    rate = 10_000.0 ** (-(column // 2 * 2) / d_model)
    angle = np.arange(length)[:, None] * rate
    table = np.where(column % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)
    if layout == "halves":
        return np.concatenate([table[:, ::2], table[:, 1::2]], axis=1)
    return table


def rotary(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """`x` [B, T, N, H] with each pair (x[i], x[i + H/2]) turned by position * base^(-2i/H).

    `positions` [T] or [B, T]. The product of a turned query and a turned key depends on their
    distance alone (Su et al. 2021, equation 16; halves rather than neighbours are paired).
    """
    half = x.shape[-1] // 2
    rate = base ** (-np.arange(half, dtype=np.float32) / half)
    angle = jnp.outer(positions, rate).reshape(-1, positions.shape[-1], 1, half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes [N] of Press et al. 2022: 2^(-8/N), 2^(-16/N), ... for N a power of two.

    Another N takes the slopes of the power of two below it, then every second one of the power
    above it.
    """
    below = 2 ** int(np.log2(num_heads))
    slopes = 2.0 ** (-8.0 / below * np.arange(1, below + 1))
    between = 2.0 ** (-4.0 / below * np.arange(1, 2 * below + 1, 2))
    return np.concatenate([slopes, between])[:num_heads].astype(np.float32)


def alibi_bias(num_heads: int, query: jax.Array, key: jax.Array) -> jax.Array:
    """-slope * |query position - key position|, [1, N, T, S], added to attention's logits."""
    distance = jnp.abs(query[:, None] - key[None, :]).astype(jnp.float32)
    return -alibi_slopes(num_heads)[None, :, None, None] * distance[None, None]


def relative_buckets(
    query: jax.Array, key: jax.Array, *, buckets: int, max_distance: int, causal: bool
) -> jax.Array:
    """Which of `buckets` the distance from each query to each key falls into, [T, S] int32.

    `query` [T] and `key` [S] are positions. The first half of the buckets hold one distance each,
    the others grow with its logarithm up to `max_distance`, and the last holds all that is farther
    (Raffel et al. 2020, section 2.1). Causal: the distance counts backwards, and keys after the
    query share bucket 0 with its own. Otherwise keys after it have the second half of `buckets`,
    those up to it the first.
    """
    behind = query[:, None] - key[None, :]
    if causal:
        return _bucket_of(jnp.maximum(behind, 0), buckets, max_distance)
    half = buckets // 2
    return _bucket_of(jnp.abs(behind), half, max_distance) + half * (behind < 0)


def _bucket_of(distance: jax.Array, buckets: int, max_distance: int) -> jax.Array:
    """The bucket of each distance >= 0, looked up in a table of all up to `max_distance`."""
    single = buckets // 2
    # In float32, as those did who trained with it: the edges of the buckets depend on rounding.
    ratio = np.maximum(np.arange(max_distance + 1), single).astype(np.float32) / single
    grown = np.log(ratio) / np.float32(np.log(max_distance / single)) * (buckets - single)
    far = np.minimum(single + grown.astype(np.int32), buckets - 1)
    table = np.where(np.arange(max_distance + 1) < single, np.arange(max_distance + 1), far)
    return jnp.take(table.astype(np.int32), distance, mode="clip")
