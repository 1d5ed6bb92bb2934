"""Position schemes: values that say how a stack of blocks knows the order of its tokens."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from jaxformer.config.checks import Checked, Count, Natural, Positive, Range
from jaxformer.config.rotary_scaling import Linear, Llama3, NoScaling, Yarn
from jaxformer.config.table_rows import take_rows
from jaxformer.errors import ConfigError

SinusoidalLayout = Literal["interleaved", "halves"]
Initializer = jax.nn.initializers.Initializer
Arrays = dict[str, Array]
ParamSpecs = dict[str, tuple[Initializer, tuple[int, ...]]]
PositionArray = Num[Array, " T"] | Num[Array, "B T"]


def positional_encoding(
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

    >>> jf.positional_encoding(length=2, d_model=4).round(2)
    array([[0.  , 1.  , 0.  , 1.  ],
           [0.84, 0.54, 0.01, 1.  ]], dtype=float32)
    """
    column = np.arange(d_model)
    rate = 10_000.0 ** (-(column // 2 * 2) / (d_model - 2 if endpoint else d_model))
    angle = np.arange(length)[:, None] * rate
    table = np.where(column % 2 == 0, np.sin(angle), np.cos(angle)).astype(np.float32)
    if layout == "halves":
        return np.concatenate([table[:, ::2], table[:, 1::2]], axis=1)
    return table


class Rotation(NamedTuple):
    """The sines and cosines of a rotation of queries and keys; the leading axis is 1 or B.

    `half` is the number of rotated pairs; the numbers of a head after them are not rotated.
    """

    sin: Float[Array, "#B T 1 half"]
    cos: Float[Array, "#B T 1 half"]


def rotate(x: Float[Array, "B T N H"], rotation: Rotation | None) -> Float[Array, "B T N H"]:
    """`x` with each pair (x[i], x[i + half]) rotated; `x` itself without a `rotation`.

    The product of a rotated query and a rotated key depends only on their distance (Su et al.
    2021, equation 16; here x[i] is paired with x[i + half] instead of its neighbour). Raises
    `ConfigError` for the rotation of larger heads.

    >>> quarter = Rotation(sin=jnp.ones((1, 1, 1, 1)), cos=jnp.zeros((1, 1, 1, 1)))
    >>> rotate(jnp.array([[[[1.0, 0.0]]]]), quarter)  # by 90 degrees
    Array([[[[0., 1.]]]], dtype=float32)
    """
    if rotation is None:
        return x
    sin, cos = rotation
    size = 2 * sin.shape[-1]
    if size > x.shape[-1]:
        raise ConfigError(
            f"the rotation is one of {size} numbers, but the heads have {x.shape[-1]}: make it by "
            f"rotation(positions, head_dim={x.shape[-1]})"
        )
    # Split before it is converted: a TPU's compiler then moves 16 bits to another layout, not 32.
    first, second = (half.astype(jnp.float32) for half in jnp.split(x[..., :size], 2, axis=-1))
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    return rotated if size == x.shape[-1] else jnp.concatenate([rotated, x[..., size:]], axis=-1)


@dataclass(frozen=True)
class PositionScheme(Checked):
    """The base of all schemes; it gives no positions.

    A scheme acts on the stack's input, on queries and keys, or on the logits of self-attention.
    Your own scheme is a frozen dataclass that defines the methods it needs. A scheme with
    parameters declares them in `params`, and gets them back in each call.

    >>> class Counted(jf.PositionScheme):
    ...     def add(self, x, positions, length, params):
    ...         return x.at[..., 0].add(positions)
    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, positions=Counted())
    """

    is_only_a_base: ClassVar[bool] = True
    """It is no choice by its name: `NoPositions` gives no positions."""

    def check(self, d_model: int, head_dim: int) -> None:
        """Raises `ConfigError` for sizes that the scheme does not support."""

    def params(
        self, d_model: int, num_heads: int, max_len: int, table_init: Initializer
    ) -> ParamSpecs:
        """The initializer and the shape of each parameter; `table_init` initializes embeddings."""
        return {}

    def add(
        self, x: Float[Array, "B T D"], positions: PositionArray, length: int, params: Arrays
    ) -> Float[Array, "B T D"]:
        """The stack's input, from `x` and the positions of its tokens, all below `length`."""
        return x

    def rotation(self, positions: PositionArray, head_dim: int) -> Rotation | None:
        """The rotation of the queries and keys of all blocks; None rotates nothing."""
        return None

    def in_windows(self) -> "PositionScheme":
        """The scheme whose rotation the blocks with a window take: this one."""
        return self

    def bias(
        self, distances: Int[Array, "*B T S"], num_heads: int, causal: bool, params: Arrays
    ) -> Float[Array, "_ N T S"] | None:
        """The bias of all attention logits, [1, N, T, S] or one of each text; None adds nothing.

        `distances` are from each key to each query, negative where the key is later; in `causal`
        attention such keys are masked.
        """
        return None


@dataclass(frozen=True)
class NoPositions(PositionScheme):
    """No positions: the order of tokens is unknown, except through a causal mask.

    >>> config = jf.TransformerConfig(11, 8, 12, num_heads=2, positions=jf.NoPositions())
    """


@dataclass(frozen=True)
class Sinusoidal(PositionScheme):
    """Adds `positional_encoding` (Vaswani et al. 2017, section 3.5).

    >>> config = jf.TransformerConfig(11, 8, 12, num_heads=2, positions=jf.Sinusoidal("halves"))
    """

    layout: SinusoidalLayout = "interleaved"
    """Order of the columns: sines and cosines alternate, or all sines come first ("halves")."""
    endpoint: bool = False
    """The wavelengths end at 10000 x 2 pi exactly, as in tensor2tensor and fairseq; the formula of
    the paper ends one step before."""
    offset: Natural = 0
    """The row of a text's first token in the table (fairseq: 2)."""

    def check(self, d_model: int, head_dim: int) -> None:
        """Raises `ConfigError` for an odd `d_model` with `endpoint`."""
        if self.endpoint and (d_model % 2 or d_model < 4):
            raise ConfigError(
                f"Sinusoidal(endpoint=True) needs an even d_model of at least 4, but d_model="
                f"{d_model} was given: change one of them"
            )

    def add(
        self, x: Float[Array, "B T D"], positions: PositionArray, length: int, params: Arrays
    ) -> Float[Array, "B T D"]:
        """`x` plus the rows of its positions."""
        rows = self.offset + length
        table = positional_encoding(rows, x.shape[-1], self.layout, endpoint=self.endpoint)
        return _add_rows(x, jnp.asarray(table[self.offset :]), positions)


@dataclass(frozen=True)
class Learned(PositionScheme):
    """Adds a learned `table` [max_len, D].

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, positions=jf.Learned())
    """

    def params(
        self, d_model: int, num_heads: int, max_len: int, table_init: Initializer
    ) -> ParamSpecs:
        """The table."""
        return {"table": (jax.nn.initializers.normal(0.02), (max_len, d_model))}

    def add(
        self, x: Float[Array, "B T D"], positions: PositionArray, length: int, params: Arrays
    ) -> Float[Array, "B T D"]:
        """`x` plus the rows of its positions; `ValueError` where the table ends too early."""
        table = params["table"]
        if length > len(table):
            raise ValueError(
                f"a sequence of {length} tokens was given, but the learned positions end at "
                f"max_len={len(table)}: shorten it"
            )
        return _add_rows(x, table, positions)


@dataclass(frozen=True)
class Rotary(PositionScheme):
    """Rotates queries and keys (Su et al. 2021).

    >>> rotary = jf.Rotary(base=100.0)
    >>> rotary.rates(head_dim=4)  # the angle per position of each of two pairs
    array([1. , 0.1], dtype=float32)
    >>> q = jax.random.normal(jax.random.key(0), (2, 3, 1, 4))  # [B, T, N, H]
    >>> rotate(q, rotary.rotation(jnp.arange(3), head_dim=4)).shape
    (2, 3, 1, 4)
    """

    base: Positive = 10_000.0
    """The base of the rotary frequencies (theta)."""
    fraction: Annotated[float, Range(0, 1, "(]")] = 1.0
    """The part of each head's numbers that is rotated, from the first on (GPT-NeoX: 0.25)."""
    scaling: NoScaling | Linear | Llama3 | Yarn = NoScaling()
    """The change of the frequencies for longer texts than in training."""
    window_base: Positive | None = None
    """The base in blocks with a window, where `scaling` changes nothing (Gemma 3: 10,000); None:
    they are rotated as all others."""

    def check(self, d_model: int, head_dim: int) -> None:
        """Raises `ConfigError` for heads whose rotated part is not made of pairs."""
        size = int(head_dim * self.fraction)
        if size % 2 or size < 2:
            part = "" if self.fraction == 1 else f" with fraction={self.fraction}: {size}"
            raise ConfigError(
                f"rotary positions rotate pairs of numbers, but head_dim={head_dim}{part} is odd "
                "or too small: give an even head_dim, and a fraction of it that is even"
            )

    def rates(self, head_dim: int) -> Float[np.ndarray, " half"]:
        """The angle per position of each pair: base^(-2i/H), changed by `scaling`."""
        half = int(head_dim * self.fraction) // 2
        rates = self.base ** (-np.arange(half, dtype=np.float32) / half)
        return self.scaling.rates(rates, self.base)

    def rotation(self, positions: PositionArray, head_dim: int) -> Rotation:
        """The rotation of pair i by the angle position * rates[i]; positions may be fractions."""
        rates = self.rates(head_dim)
        angle = jnp.outer(positions.astype(rates.dtype), jnp.asarray(rates))
        angle = angle.reshape(-1, positions.shape[-1], 1, len(rates))
        sin, cos, factor = jnp.sin(angle), jnp.cos(angle), self.scaling.magnitude
        return Rotation(sin, cos) if factor == 1 else Rotation(sin * factor, cos * factor)

    def in_windows(self) -> "Rotary":
        """The positions of blocks with a window."""
        base = self.window_base
        return self if base is None else Rotary(base, self.fraction)


@dataclass(frozen=True)
class Alibi(PositionScheme):
    """Subtracts from the logits in proportion to the distance (Press et al. 2022).

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, positions=jf.Alibi())
    """

    def bias(
        self, distances: Int[Array, "*B T S"], num_heads: int, causal: bool, params: Arrays
    ) -> Float[Array, "_ N T S"]:
        """-slope * |distance|."""
        distance = jnp.abs(distances).astype(jnp.float32)
        distance = distance.reshape(-1, 1, *distance.shape[-2:])
        return -jnp.asarray(alibi_slopes(num_heads))[None, :, None, None] * distance


@dataclass(frozen=True)
class Relative(PositionScheme):
    """Adds a learned number per head and bucket of distances (Raffel et al. 2020, section 2.1).

    >>> t5 = jf.Relative(buckets=32, max_distance=128)
    """

    buckets: Annotated[int, Range(4)] = 32
    """The number of distance buckets."""
    max_distance: Count = 128
    """All distances from this one on share the last bucket."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance <= self.buckets // 2:
            raise ConfigError(
                f"max_distance={self.max_distance} is too small for buckets={self.buckets}: give "
                f"more than {self.buckets // 2}"
            )

    def params(
        self, d_model: int, num_heads: int, max_len: int, table_init: Initializer
    ) -> ParamSpecs:
        """The number of each bucket and head."""
        return {"relative_bias": (table_init, (self.buckets, num_heads))}

    def bias(
        self, distances: Int[Array, "*B T S"], num_heads: int, causal: bool, params: Arrays
    ) -> Float[Array, "_ N T S"]:
        """The numbers of the buckets of the distances."""
        distances = distances.reshape(-1, *distances.shape[-2:])
        bucket = relative_buckets(distances, self.buckets, self.max_distance, causal)
        return jnp.moveaxis(jnp.take(params["relative_bias"], bucket, axis=0), -1, 1)


AnyPositions = NoPositions | Sinusoidal | Learned | Rotary | Alibi | Relative
"""The schemes that a command knows by name."""


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " N"]:
    """The slopes of Press et al. 2022: 2^(-8/N), 2^(-16/N), ... for N a power of two.

    For another N: the slopes of the next lower power of two, then every second slope of the next
    higher one.
    """
    below = 2 ** int(np.log2(num_heads))
    slopes = 2.0 ** (-8.0 / below * np.arange(1, below + 1))
    between = 2.0 ** (-4.0 / below * np.arange(1, 2 * below + 1, 2))
    return np.concatenate([slopes, between])[:num_heads].astype(np.float32)


def relative_buckets(
    distances: Int[Array, "*B T S"], buckets: int, max_distance: int, causal: bool
) -> Int[Array, "*B T S"]:
    """The bucket of each distance from a key to a later query, negative where the key is later.

    The first half of the buckets hold one distance each, the widths of the others grow with the
    logarithm of the distance up to `max_distance`, and the last holds all larger distances (Raffel
    et al. 2020, section 2.1). If `causal`, keys after the query are in bucket 0. Otherwise they use
    the second half of `buckets`, the others the first half.
    """
    if causal:
        return _bucket_of(jnp.maximum(distances, 0), buckets, max_distance)
    half = buckets // 2
    return _bucket_of(jnp.abs(distances), half, max_distance) + half * (distances < 0)


def _bucket_of(distance: jax.Array, buckets: int, max_distance: int) -> jax.Array:
    """The bucket of each distance >= 0, looked up in a table up to `max_distance`."""
    single = buckets // 2
    # In float32, as the published models were trained: the edges of the buckets depend on rounding.
    ratio = np.maximum(np.arange(max_distance + 1), single).astype(np.float32) / single
    grown = np.log(ratio) / np.float32(np.log(max_distance / single)) * (buckets - single)
    far = np.minimum(single + grown.astype(np.int32), buckets - 1)
    table = np.where(np.arange(max_distance + 1) < single, np.arange(max_distance + 1), far)
    return jnp.take(table.astype(np.int32), distance, mode="clip")


def _add_rows(x: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
    """`x` plus the rows of its positions; beyond the table NaN, or `ValueError` if not traced."""
    if not isinstance(positions, Tracer) and positions.size:
        first, last = int(jnp.min(positions)), int(jnp.max(positions))
        if first < 0 or last >= len(table):
            raise ValueError(
                f"positions from {first} to {last} were given, but they must be 0 to "
                f"{len(table) - 1}: give a larger max_len, or rotary positions, which never end"
            )
    rows = take_rows(table, positions).reshape(-1, *x.shape[1:])
    return x + rows.astype(x.dtype)
