"""Multi-head attention (Vaswani et al. 2017, section 3.2.2)."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.parts import NormOptions
from jaxformer.config.positions import Rotation, rotate
from jaxformer.errors import ConfigError
from jaxformer.nn.cache import KeyValue
from jaxformer.nn.layers import Dense, Dropout, Initializer, Norm, check_axes
from jaxformer.ops import dropout as ops_dropout
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AttentionMask, check_mask
from jaxformer.ops.partitioning import divide_heads, gather_heads


class MultiHeadAttention(nn.Module):
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

    TAPS: ClassVar[dict[str, Any]] = {
        "queries": "queries",
        "keys_values": ("keys", "values"),
        "attend": "heads",
        "__call__": "output",
    }

    num_heads: int
    head_dim: int | None = None
    """H, the size of a head's queries and keys; None: D / N."""
    value_head_dim: int | None = None
    """Hv, the size of a head's values; None: H."""
    num_kv_heads: int | None = None
    """K, the number of key/value heads, each shared by a group of heads; None: N."""
    query_scalar: float | None = None
    """Products of queries and keys are divided by the square root of this; None: H."""
    softcap: float | None = None
    """Attention logits x become c tanh(x / c) with this c; None: they stay."""
    query_key_norm: NormOptions | None = None
    """The norm over each head's queries and keys, before positions; None: none."""
    dropout_rate: float = 0.0
    """Dropout on the attention weights."""
    qkv_bias: bool = True
    """Projections to queries, keys and values have biases."""
    use_bias: bool = True
    """The output projection and the norms have biases."""
    attention_fn: AttentionFn = reference
    kernel_init: Initializer = nn.initializers.xavier_uniform()
    out_init: Initializer | None = None
    """The initializer of the output projection; None: `kernel_init`."""
    dtype: Any = jnp.float32

    def setup(self) -> None:
        self.dropout: Dropout = Dropout(self.dropout_rate, "weights")
        if self.query_key_norm is not None:
            kind, eps = self.query_key_norm.kind, self.query_key_norm.eps
            self.query_norm: Norm = Norm(kind, eps, self.use_bias)
            self.key_norm: Norm = Norm(kind, eps, self.use_bias)

    def __call__(
        self,
        x: Float[Array, "R T D"],
        kv: KeyValue | Float[Array, "B S E"] | None = None,
        mask: AttentionMask | None = None,
        *,
        rotation: Rotation | None = None,
        bias: Float[Array, "_ N Q S"] | None = None,
        dropout_rng: DropoutRng | None = None,
    ) -> Float[Array, "R T D"]:
        """The output of attention from the tokens of `x` to `kv` [B, S, ...].

        `kv` are vectors of any width, or their keys and values; it defaults to `x`
        (self-attention), `mask` to one that allows everything. The queries are rotated by
        `rotation`, and `bias` is added to the scaled logits.
        """
        mask = AttentionMask() if mask is None else mask
        q = self.queries(x, rotation)
        if kv is None:
            kv = self.keys_values(x, rotation)
        elif not isinstance(kv, tuple):
            kv = self.keys_values(kv, size=q.shape[-1])
        heads = self.attend(q, *kv, mask, bias, self.dropout.at(dropout_rng, len(x)))
        return self.project("out", heads, (x.shape[-1],))

    def queries(
        self, x: Float[Array, "R T D"], rotation: Rotation | None = None
    ) -> Float[Array, "R T N H"]:
        """The queries of `x`, rotated by `rotation`."""
        check_axes("x", x, "B T D")
        q = self.project("query", x, (self.num_heads, self._size(x)))
        q = q if self.query_key_norm is None else self.query_norm(q)
        return q if rotation is None else rotate(q, rotation)

    def keys_values(
        self, x: Float[Array, "B S E"], rotation: Rotation | None = None, size: int | None = None
    ) -> KeyValue:
        """Keys [B, S, K, H], rotated by `rotation`, and values [B, S, K, Hv] of `x`.

        `size` is H; None: E / N where the module has no `head_dim`.
        """
        check_axes("x", x, "B T D")
        heads, size = self.num_kv_heads or self.num_heads, size or self._size(x)
        k = self.project("key", x, (heads, size))
        k = k if self.query_key_norm is None else self.key_norm(k)
        v = self.project("value", x, (heads, self.value_head_dim or size))
        return KeyValue(k if rotation is None else rotate(k, rotation), v)

    def attend(
        self,
        q: Float[Array, "R T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        mask: AttentionMask,
        bias: Float[Array, "_ N Q S"] | None,
        dropout: ops_dropout.Dropout | None,
        **options: Any,
    ) -> Float[Array, "R T N Hv"]:
        """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V of each head (equation 1)."""
        scale = 1.0 / math.sqrt(self.query_scalar or q.shape[-1])
        options |= {} if self.softcap is None else {"softcap": self.softcap}
        beams = len(q) // max(len(k), 1)  # their queries are further ones of a sentence
        check_mask(mask, (len(k), beams * q.shape[1], k.shape[1]))
        q, k, v = divide_heads(q, k, v)
        heads = self.attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)
        return gather_heads(heads)

    @nn.compact
    def project(
        self, name: str, x: Float[Array, "..."], features: tuple[int, ...]
    ) -> Float[Array, "..."]:
        """The projection `name` of `x`: to heads, or with "out" from all heads to D."""
        is_out = name == "out"
        default = self.kernel_init
        return Dense(
            features,
            num_inputs=2 if is_out else 1,
            use_bias=self.use_bias if is_out else self.qkv_bias,
            dtype=self.dtype,
            kernel_init=(self.out_init or default) if is_out else default,
            name=name,
        )(x)

    def _size(self, x: Array) -> int:
        """H, the size of a head's queries and keys."""
        if self.head_dim is None and x.shape[-1] % self.num_heads:
            raise ConfigError(
                f"vectors of {x.shape[-1]} numbers are not divisible by num_heads="
                f"{self.num_heads}: choose a divisor, or give head_dim"
            )
        return self.head_dim or x.shape[-1] // self.num_heads
