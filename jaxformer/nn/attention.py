"""Multi-head attention (Vaswani et al. 2017, section 3.2.2)."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.checks import Count, Positive, UnitInterval
from jaxformer.config.positions import Rotation, rotate
from jaxformer.config.transformer import check_kv_heads, check_norm_over_heads
from jaxformer.errors import ConfigError
from jaxformer.nn.cache import LayerCache, fold_beams
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.nn.dense import Dense, Initializer
from jaxformer.nn.dropout import Dropout
from jaxformer.nn.norm import Norm
from jaxformer.nn.taps import tap
from jaxformer.ops.attention import AttentionFn, check_attention_fn, reference
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AttentionMask, check_mask
from jaxformer.ops.partitioning import divide_heads, gather_heads


class MultiHeadAttention(CheckedModule):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O.

    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V). Self-attention, cross-attention and cached
    decoding differ only in where keys and values come from.

    >>> attention = jf.MultiHeadAttention(num_heads=2)
    >>> x = jax.random.normal(jax.random.key(0), (3, 5, 8))  # [B, T, D]
    >>> out, variables = attention.init_with_output(jax.random.key(1), x)
    >>> out.shape
    (3, 5, 8)
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))  # 4 x (8 x 8 + 8)
    288
    """

    AXES: ClassVar[Mapping[str, str]] = {
        "query/kernel": "embed -> heads head_dim",
        "query/bias": "heads head_dim",
        "key/kernel": "embed -> kv_heads head_dim",
        "key/bias": "kv_heads head_dim",
        "value/kernel": "embed -> kv_heads head_dim",
        "value/bias": "kv_heads head_dim",
        "out/kernel": "heads head_dim -> embed",
        "out/bias": "embed",
    }

    num_heads: Count
    head_dim: Count | None = None
    """H, the size of a head's queries and keys; None: D / N."""
    value_head_dim: Count | None = None
    """Hv, the size of a head's values; None: H."""
    num_kv_heads: Count | None = None
    """K, the number of key/value heads, each shared by a group of heads; None: N."""
    query_scalar: Positive | None = None
    """Products of queries and keys are divided by the square root of this; None: H."""
    softcap: Positive | None = None
    """Attention logits x become c tanh(x / c) with this c; None: they stay."""
    query_key_norm: bool = False
    """A norm over each head's queries and keys, before positions."""
    norm_over_heads: bool = False
    """That norm is one over the numbers of all heads."""
    dropout_rate: UnitInterval = 0.0
    """Dropout on the attention weights."""
    qkv_bias: bool | None = None
    """Projections to queries, keys and values have biases; None: `use_bias`."""
    use_bias: bool = True
    """The output projection has a bias."""
    make_norm: Callable[[], nn.Module] = Norm
    """Makes the norms of queries and keys."""
    attention_fn: AttentionFn = reference
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    """The initializer of the output projection; None: `kernel_init`."""
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kv_heads(self.num_heads, self.num_kv_heads)
        check_norm_over_heads(self.norm_over_heads, self.query_key_norm)
        check_attention_fn(self.attention_fn)

    def setup(self) -> None:
        qkv_bias = self.use_bias if self.qkv_bias is None else self.qkv_bias
        project = partial(Dense, use_bias=qkv_bias, kernel_init=self.kernel_init, dtype=self.dtype)
        self.query: Dense = project()
        self.key: Dense = project()
        self.value: Dense = project()
        self.out: Dense = Dense(
            num_inputs=2,
            use_bias=self.use_bias,
            kernel_init=self.out_init or self.kernel_init,
            dtype=self.dtype,
        )
        self.dropout: Dropout = Dropout(self.dropout_rate, "weights")
        if self.query_key_norm:
            self.query_norm: nn.Module = self.make_norm()
            self.key_norm: nn.Module = self.make_norm()

    def __call__(
        self,
        x: Float[Array, "R T D"],
        kv: tuple[Array, Array] | Float[Array, "B S E"] | None = None,
        mask: AttentionMask | None = None,
        *,
        rotation: Rotation | None = None,
        bias: Float[Array, "_ N Q S"] | None = None,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "R T D"]:
        """The output of attention from the tokens of `x` to `kv` [B, S, ...].

        `kv` are vectors of any width, or the pair of their keys and values (`keys_values`); it
        defaults to `x` (self-attention), `mask` to one that allows everything. `rotation` is that
        of the positions of `x`: queries are rotated by it, and keys that are made of `x`. `bias` is
        added to the scaled logits. Raises `ConfigError` for a `rotation` with vectors in `kv`,
        whose keys have other positions.
        """
        q = self.queries(x, rotation)
        if kv is None:
            k, v = self.keys_values(x, rotation)
        elif isinstance(kv, tuple):
            k, v = kv
        else:
            _check_no_rotation(rotation)
            k, v = self.keys_values(kv, head_dim=q.shape[-1])
        heads = self.attend(q, k, v, mask, bias, dropout_rng)
        return tap(self, "output", self.out(heads, x.shape[-1]))

    def init_cache(
        self, batch_size: int, num_beams: int, max_length: int, d_model: int
    ) -> LayerCache:
        """Room for the keys and values of `num_beams` beams of `batch_size` sentences.

        Each beam has up to `max_length` tokens, whose vectors have `d_model` numbers.
        """
        head_dim = self.head_dim or d_model // self.num_heads
        return LayerCache.empty(
            batch_size,
            num_beams,
            max_length,
            kv_heads=self.num_kv_heads or self.num_heads,
            key_size=head_dim,
            value_size=self.value_head_dim or head_dim,
            dtype=self.dtype,
        )

    def decode(
        self,
        x: Float[Array, "R T D"],
        layer_cache: LayerCache,
        mask: AttentionMask,
        *,
        rotation: Rotation | None = None,
        bias: Float[Array, "_ N Q S"] | None = None,
    ) -> tuple[Float[Array, "R T D"], LayerCache]:
        """Self-attention of the tokens of `x`, and `layer_cache` with their keys and values.

        The first of them has the position `mask.offset`. R is B times the number of beams.
        """
        keys, values = self.keys_values(x, rotation)
        layer_cache = layer_cache.write(keys, values, mask.offset)
        return self(x, layer_cache.read(), mask, rotation=rotation, bias=bias), layer_cache

    def queries(
        self, x: Float[Array, "R T D"], rotation: Rotation | None = None
    ) -> Float[Array, "R T N H"]:
        """The queries of `x`, normalised if asked, rotated by `rotation`."""
        _check_has_batch(x)
        q = self.query(x, (self.num_heads, self.head_size(x)))
        if self.query_key_norm:
            q = normalize(q, self.query_norm, over_heads=self.norm_over_heads)
        return tap(self, "queries", rotate(q, rotation))

    def keys_values(
        self,
        x: Float[Array, "B S E"],
        rotation: Rotation | None = None,
        head_dim: int | None = None,
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
        """The keys of `x`, normalised if asked, rotated by `rotation`, and its values.

        `head_dim` is H; None: the module's, or else E / N.
        """
        _check_has_batch(x)
        kv_heads = self.num_kv_heads or self.num_heads
        head_dim = head_dim or self.head_size(x)
        k = self.key(x, (kv_heads, head_dim))
        if self.query_key_norm:
            k = normalize(k, self.key_norm, over_heads=self.norm_over_heads)
        k = rotate(k, rotation)
        v = self.value(x, (kv_heads, self.value_head_dim or head_dim))
        return tap(self, "keys", k), tap(self, "values", v)

    def attend(
        self,
        q: Float[Array, "R T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        mask: AttentionMask | None,
        bias: Float[Array, "_ N Q S"] | None,
        dropout_rng: DropoutRng | Array | None,
    ) -> Float[Array, "R T N Hv"]:
        """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V of each head (equation 1)."""
        mask = AttentionMask() if mask is None else mask
        beams = len(q) // max(len(k), 1)  # their queries are further ones of a sentence
        check_mask(mask, (len(k), beams * q.shape[1], k.shape[1]))
        options: dict[str, Any] = {"scale": 1.0 / math.sqrt(self.query_scalar or q.shape[-1])}
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.attention_fn is reference:  # no other function keeps the weights
            options["on_weights"] = partial(tap, self, "weights")
        dropout = self.dropout.at(dropout_rng, q)
        attention_fn = self.attention_fn
        if mask.from_cache or beams > 1:
            attention_fn = partial(fold_beams, attention_fn)
        q, k, v = divide_heads(q, k, v)
        heads = attention_fn(q, k, v, mask, bias=bias, dropout=dropout, **options)
        return tap(self, "heads", gather_heads(heads))

    def head_size(self, x: Float[Array, "B T D"]) -> int:
        """H; raises `ConfigError` where it follows from `x`, which the heads do not divide."""
        if self.head_dim is None and x.shape[-1] % self.num_heads:
            raise ConfigError(
                f"vectors of {x.shape[-1]} numbers are not divisible by num_heads="
                f"{self.num_heads}: choose a divisor, or give head_dim"
            )
        return self.head_dim or x.shape[-1] // self.num_heads


def normalize(
    x: Float[Array, "B T N H"], norm: Callable[[Array], Array], *, over_heads: bool
) -> Float[Array, "B T N H"]:
    """The norm of each head's numbers in `x`, or of the numbers of all heads."""
    rows = x.reshape(*x.shape[:2], -1) if over_heads else x
    return norm(rows).reshape(x.shape)


def _check_no_rotation(rotation: Rotation | None) -> None:
    if rotation is not None:
        raise ConfigError(
            "rotation was given with vectors in kv, whose keys have positions of their own: give "
            "kv=attention.keys_values(vectors, their_rotation)"
        )


def _check_has_batch(x: Array) -> None:
    if x.ndim != 3:
        raise ValueError(
            f"x has the shape {x.shape}, but must be [B, T, D]: one example alone is a batch "
            "of one, as in x[None]"
        )
