"""Where a token stands: the sinusoidal table, rotary turning, ALiBi slopes."""

import jax
import jax.numpy as jnp
import numpy as np


def sinusoidal_positions(length: int, d_model: int) -> np.ndarray:
    """The table [length, d_model] float32 of Vaswani et al. 2017, section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos of the same angle; with an
    odd `d_model` the last column is a sine without its cosine.
    """
    column = np.arange(d_model)
    rate = 10_000.0 ** (-(column // 2 * 2) / d_model)
    angle = np.arange(length)[:, None] * rate
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)


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
