"""Position schemes: the sinusoidal table, rotary positions, ALiBi, relative buckets."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.config import SinusoidalLayout, TransformerConfig


def sinusoidal_positions(
    length: int, d_model: int, layout: SinusoidalLayout = "interleaved"
) -> Float[np.ndarray, "T D"]:
    """The table of Vaswani et al. 2017, section 3.5, for T = `length` and D = `d_model`; float32.

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


def rotary_rates(config: TransformerConfig) -> Float[np.ndarray, " half"]:
    """The angle per position of each of H/2 pairs: base^(-2i/H), changed by `rotary_scaling`.

    "linear" divides all of them by `rotary_factor` (Chen et al. 2023). "llama3" divides those that
    make fewer turns in `rotary_original_len` positions than `rotary_low_freq_factor`, keeps those
    that make more than `rotary_high_freq_factor`, and interpolates between (Llama 3.1).
    """
    half = config.key_size // 2
    rates = config.rotary_base ** (-np.arange(half, dtype=np.float32) / half)
    if config.rotary_scaling == "none":
        return rates
    kept = np.zeros_like(rates)
    if config.rotary_scaling == "llama3":
        low, high = config.rotary_low_freq_factor, config.rotary_high_freq_factor
        turns = config.rotary_original_len * rates / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
    return (rates * (kept + (1 - kept) / config.rotary_factor)).astype(np.float32)


def rotary(
    x: Float[Array, "B T N H"],
    positions: Int[Array, " T"] | Int[Array, "B T"],
    rates: Float[np.ndarray, " half"],
) -> Float[Array, "B T N H"]:
    """`x` with each pair (x[i], x[i + H/2]) rotated by the angle position * rates[i].

    The product of a rotated query and a rotated key depends only on their distance (Su et al.
    2021, equation 16; here x[i] is paired with x[i + H/2] instead of its neighbour).
    """
    half = x.shape[-1] // 2
    angle = jnp.outer(positions, jnp.asarray(rates)).reshape(-1, positions.shape[-1], 1, half)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " N"]:
    """The slopes of Press et al. 2022: 2^(-8/N), 2^(-16/N), ... for N a power of two.

    For another N: the slopes of the next lower power of two, then every second slope of the next
    higher one.
    """
    below = 2 ** int(np.log2(num_heads))
    slopes = 2.0 ** (-8.0 / below * np.arange(1, below + 1))
    between = 2.0 ** (-4.0 / below * np.arange(1, 2 * below + 1, 2))
    return np.concatenate([slopes, between])[:num_heads].astype(np.float32)


def alibi_bias(
    num_heads: int, query: Int[Array, " T"], key: Int[Array, " S"]
) -> Float[Array, "1 N T S"]:
    """-slope * |query position - key position|, to be added to the attention logits."""
    distance = jnp.abs(query[:, None] - key[None, :]).astype(jnp.float32)
    return -jnp.asarray(alibi_slopes(num_heads))[None, :, None, None] * distance[None, None]


def relative_buckets(
    query: Int[Array, " T"],
    key: Int[Array, " S"],
    *,
    buckets: int,
    max_distance: int,
    causal: bool,
) -> Int[Array, "T S"]:
    """The bucket of the distance from each query position to each key position.

    The first half of the buckets hold one distance each, the widths of the others grow with the
    logarithm of the distance up to `max_distance`, and the last holds all larger distances (Raffel
    et al. 2020, section 2.1). If `causal`, distances count backwards and keys after the query are
    in bucket 0. Otherwise keys after the query use the second half of `buckets`, the others the
    first half.
    """
    behind = query[:, None] - key[None, :]
    if causal:
        return _bucket_of(jnp.maximum(behind, 0), buckets, max_distance)
    half = buckets // 2
    return _bucket_of(jnp.abs(behind), half, max_distance) + half * (behind < 0)


def _bucket_of(distance: jax.Array, buckets: int, max_distance: int) -> jax.Array:
    """The bucket of each distance >= 0, looked up in a table up to `max_distance`."""
    single = buckets // 2
    # In float32, as the published models were trained: the edges of the buckets depend on rounding.
    ratio = np.maximum(np.arange(max_distance + 1), single).astype(np.float32) / single
    grown = np.log(ratio) / np.float32(np.log(max_distance / single)) * (buckets - single)
    far = np.minimum(single + grown.astype(np.int32), buckets - 1)
    table = np.where(np.arange(max_distance + 1) < single, np.arange(max_distance + 1), far)
    return jnp.take(table.astype(np.int32), distance, mode="clip")
