"""Position schemes: how a stack of blocks knows the order of its tokens."""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Num

from jaxformer.config import Positions, SinusoidalLayout, TransformerConfig
from jaxformer.nn.layers import table_init


def sinusoidal_positions(
    length: int,
    d_model: int,
    layout: SinusoidalLayout = "interleaved",
    *,
    endpoint: bool = False,
) -> Float[np.ndarray, "T D"]:
    """The table of Vaswani et al. 2017, section 3.5, for T = `length` and D = `d_model`; float32.

    PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos of the same angle; with an
    odd `d_model` the last column is a sine without its cosine. The layout "halves" puts all sines
    before all cosines, as Marian does (Junczys-Dowmunt et al. 2018). With `endpoint` the divisor in
    the exponent is d_model - 2, as in fairseq, so that the last wavelength is 10000 * 2 pi.
    """
    column = np.arange(d_model)
    rate = 10_000.0 ** (-(column // 2 * 2) / (d_model - 2 if endpoint else d_model))
    angle = np.arange(length)[:, None] * rate
    table = np.where(column % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)
    if layout == "halves":
        return np.concatenate([table[:, ::2], table[:, 1::2]], axis=1)
    return table


def rotary_rates(config: TransformerConfig) -> Float[np.ndarray, " half"]:
    """The angle per position of each of H/2 pairs: base^(-2i/H), changed by `rotary_scaling`.

    H is `rotary_size`, the part of a head that is rotated. "linear" divides all angles by
    `rotary_factor` (Chen et al. 2023). "llama3" divides those that make fewer turns in
    `rotary_original_len` positions than `rotary_low_freq_factor`, keeps those that make more than
    `rotary_high_freq_factor`, and interpolates between (Llama 3.1). "yarn" does so with
    `rotary_beta_slow` and `rotary_beta_fast`, and interpolates over i (Peng et al. 2023).
    """
    half = config.rotary_size // 2
    rates = config.rotary_base ** (-np.arange(half, dtype=np.float32) / half)
    if config.rotary_scaling == "none":
        return rates
    kept = np.zeros_like(rates)
    if config.rotary_scaling == "llama3":
        low, high = config.rotary_low_freq_factor, config.rotary_high_freq_factor
        turns = config.rotary_original_len * rates / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
    if config.rotary_scaling == "yarn":
        kept = _kept_by_yarn(config, half)
    return (rates * (kept + (1 - kept) / config.rotary_factor)).astype(np.float32)


def _kept_by_yarn(config: TransformerConfig, half: int) -> Float[np.ndarray, " half"]:
    """Which share of each pair's angle is not divided: 1 for the first pairs, 0 for the last."""

    def pair_of(turns: float) -> float:
        """The pair, not rounded, that makes so many turns in `rotary_original_len` positions."""
        length = config.rotary_original_len / (2 * np.pi * turns)
        return half * np.log(length) / np.log(config.rotary_base)

    low = max(np.floor(pair_of(config.rotary_beta_fast)), 0)
    high = min(np.ceil(pair_of(config.rotary_beta_slow)), 2 * half - 1)
    width = high - low or 1e-3
    return 1 - np.clip((np.arange(half, dtype=np.float32) - low) / width, 0, 1)


def rotary_magnitude(config: TransformerConfig) -> float:
    """The factor of rotated queries and keys: 1, or that of "yarn" (Peng et al. 2023, eq. 22)."""
    if config.rotary_scaling != "yarn":
        return 1.0
    if config.rotary_attention_factor is None:
        return 0.1 * math.log(config.rotary_factor) + 1.0
    return config.rotary_attention_factor


class Rotation(NamedTuple):
    """The sines and cosines of a rotation of queries and keys; the leading axis is 1 or B.

    `half` is the number of pairs; the numbers of a head after them are not rotated.

    >>> quarter = Rotation(sin=jnp.ones((1, 1, 1, 1)), cos=jnp.zeros((1, 1, 1, 1)))
    >>> rotate(jnp.array([[[[1.0, 0.0]]]]), quarter)  # by 90 degrees
    Array([[[[0., 1.]]]], dtype=float32)
    """

    sin: Float[Array, "#B T 1 half"]
    cos: Float[Array, "#B T 1 half"]


def rotary(
    positions: Num[Array, " T"] | Num[Array, "B T"], rates: Float[np.ndarray, " half"]
) -> Rotation:
    """The rotation of pair i by the angle position * rates[i]; positions may be fractions."""
    angle = jnp.outer(positions, jnp.asarray(rates))
    angle = angle.reshape(-1, positions.shape[-1], 1, len(rates))
    return Rotation(jnp.sin(angle), jnp.cos(angle))


def rotate(x: Float[Array, "B T N H"], rotation: Rotation | None) -> Float[Array, "B T N H"]:
    """`x` with each pair (x[i], x[i + half]) rotated; `x` itself without a rotation.

    The product of a rotated query and a rotated key depends only on their distance (Su et al.
    2021, equation 16; here x[i] is paired with x[i + half] instead of its neighbour).
    """
    if rotation is None:
        return x
    sin, cos = rotation
    size = 2 * sin.shape[-1]
    first, second = jnp.split(x[..., :size].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    return rotated if size == x.shape[-1] else jnp.concatenate([rotated, x[..., size:]], axis=-1)


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
    num_heads: int, query: Num[Array, " T"], key: Num[Array, " S"]
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


class PositionScheme(nn.Module):
    """The base class, which gives no positions; it is the scheme "none".

    A scheme acts at one or more of three places: on the stack's input, on queries and keys, and on
    the logits of self-attention. Your own scheme is a subclass that defines the methods it needs.

    >>> class Counted(jf.PositionScheme):
    ...     def add(self, x, positions, length):
    ...         return x.at[..., 0].add(positions)
    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, positions="none")
    >>> model = jf.DecoderOnly(config, position_scheme=Counted)
    >>> x = Counted(config).apply({}, jnp.zeros((3, 8)), jnp.arange(3), 3, method="add")
    >>> x[:, 0]
    Array([0., 1., 2.], dtype=float32)
    """

    config: TransformerConfig

    def add(
        self, x: Float[Array, "B T D"], positions: Int[Array, " T"] | Int[Array, "B T"], length: int
    ) -> Float[Array, "B T D"]:
        """The stack's input, from `x` and the `positions` of its tokens, all below `length`."""
        return x

    def rotation(self, positions: Int[Array, " T"] | Int[Array, "B T"]) -> Rotation | None:
        """The rotation of the queries and keys of all blocks; None rotates nothing."""
        return None

    def bias(
        self, queries: Int[Array, " T"], keys: Int[Array, " S"], causal: bool
    ) -> Float[Array, "1 N T S"] | None:
        """The bias of all attention logits, from the positions of queries and keys.

        If `causal`, keys after the query are masked.
        """
        return None


MakePositionScheme = Callable[[TransformerConfig], PositionScheme]
"""scheme(config) -> a `PositionScheme`, such as its subclasses."""


class SinusoidalPositions(PositionScheme):
    """Adds the table of sines and cosines (Vaswani et al. 2017, section 3.5)."""

    def add(
        self, x: Float[Array, "B T D"], positions: Int[Array, " T"] | Int[Array, "B T"], length: int
    ) -> Float[Array, "B T D"]:
        """`x` plus the rows `positions` of the table."""
        config, first = self.config, self.config.sinusoidal_offset
        layout, endpoint = config.sinusoidal_layout, config.sinusoidal_endpoint
        table = sinusoidal_positions(first + length, config.d_model, layout, endpoint=endpoint)
        return _add_rows(x, jnp.asarray(table[first:]), positions)


class LearnedPositions(PositionScheme):
    """Adds a learned `table` [max_len, D]."""

    AXES: ClassVar[Mapping[str, str]] = {"table": "position -> embed"}

    def setup(self) -> None:
        shape = self.config.max_len, self.config.d_model
        self.table: Array = self.param("table", nn.initializers.normal(0.02), shape)

    def add(
        self, x: Float[Array, "B T D"], positions: Int[Array, " T"] | Int[Array, "B T"], length: int
    ) -> Float[Array, "B T D"]:
        """`x` plus the rows `positions` of the table; `ValueError` if it ends before `length`."""
        if length > self.config.max_len:
            raise ValueError(
                f"a sequence of {length} tokens was given, but the learned positions end at "
                f"max_len={self.config.max_len}: shorten it"
            )
        return _add_rows(x, self.table, positions)


class RotaryPositions(PositionScheme):
    """Rotates queries and keys (Su et al. 2021)."""

    def rotation(self, positions: Int[Array, " T"] | Int[Array, "B T"]) -> Rotation:
        """The rotation by `positions` times the rates of the config."""
        sin, cos = rotary(positions, rotary_rates(self.config))
        factor = rotary_magnitude(self.config)
        return Rotation(sin, cos) if factor == 1 else Rotation(sin * factor, cos * factor)


class AlibiPositions(PositionScheme):
    """Subtracts from the logits in proportion to the distance (Press et al. 2022)."""

    def bias(
        self, queries: Int[Array, " T"], keys: Int[Array, " S"], causal: bool
    ) -> Float[Array, "1 N T S"]:
        """`alibi_bias` of the positions."""
        return alibi_bias(self.config.num_heads, queries, keys)


class RelativePositions(PositionScheme):
    """Adds a learned number per head and bucket of distances (Raffel et al. 2020, section 2.1)."""

    AXES: ClassVar[Mapping[str, str]] = {"relative_bias": "bucket -> heads"}

    def setup(self) -> None:
        shape = self.config.relative_buckets, self.config.num_heads
        self.relative_bias: Array = self.param("relative_bias", table_init(self.config), shape)

    def bias(
        self, queries: Int[Array, " T"], keys: Int[Array, " S"], causal: bool
    ) -> Float[Array, "1 N T S"]:
        """The numbers of the buckets of the distances from `queries` to `keys`."""
        config = self.config
        found = relative_buckets(
            queries,
            keys,
            buckets=config.relative_buckets,
            max_distance=config.relative_max_distance,
            causal=causal,
        )
        return jnp.moveaxis(jnp.take(self.relative_bias, found, axis=0), -1, 0)[None]


POSITION_SCHEMES: dict[Positions, MakePositionScheme] = {
    "none": PositionScheme,
    "sinusoidal": SinusoidalPositions,
    "learned": LearnedPositions,
    "rotary": RotaryPositions,
    "alibi": AlibiPositions,
    "relative": RelativePositions,
}
"""The schemes that `config.positions` names."""


def _add_rows(x: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
    rows = jnp.take(table, positions, axis=0).reshape(-1, *x.shape[1:])
    return x + rows.astype(x.dtype)
