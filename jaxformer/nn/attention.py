"""Multi-head attention (Vaswani et al. 2017, section 3.2.2)."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.positions import Rotation, rotate
from jaxformer.errors import ConfigError
from jaxformer.nn.cache import fold_beams
from jaxformer.nn.layers import Dropout, Initializer, Norm, tap
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.ops.dense import Dense
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AttentionMask, check_mask
from jaxformer.ops.partitioning import divide_heads, gather_heads

TAPS = {"query": "queries", "key": "keys", "value": "values"}
"""The name under which the result of each projection is recorded."""


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
    query_key_norm: bool = False
    """A norm over each head's queries and keys, before positions."""
    norm_over_heads: bool = False
    """That norm is one over the numbers of all heads."""
    dropout_rate: float = 0.0
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

    def setup(self) -> None:
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
        dropout_rng: DropoutRng | None = None,
    ) -> Float[Array, "R T D"]:
        """The output of attention from the tokens of `x` to `kv` [B, S, ...].

        `kv` are vectors of any width, or the pair of their keys and values (`keys_values`); it
        defaults to `x` (self-attention), `mask` to one that allows everything. The queries are
        rotated by `rotation`, and `bias` is added to the scaled logits.
        """
        if kv is None:
            q, k, v = self.project(x, ("query", "key", "value"), rotation=rotation)
        else:
            (q,) = self.project(x, ("query",), rotation=rotation)
            k, v = kv if isinstance(kv, tuple) else self.keys_values(kv, size=q.shape[-1])
        mask = AttentionMask() if mask is None else mask
        heads = self.attend(q, k, v, mask, bias, dropout_rng)
        (out,) = self.project(tap(self, "heads", heads), width=x.shape[-1])
        return tap(self, "output", out)

    def keys_values(
        self, x: Float[Array, "B S E"], rotation: Rotation | None = None, size: int | None = None
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
        """The keys of `x`, rotated by `rotation`, and its values.

        `size` is H; None: E / N where the module has no `head_dim`.
        """
        k, v = self.project(x, ("key", "value"), size, rotation)
        return k, v

    @nn.compact
    def project(
        self,
        x: Float[Array, "..."],
        names: tuple[str, ...] = (),
        size: int | None = None,
        rotation: Rotation | None = None,
        width: int | None = None,
    ) -> list[Float[Array, "..."]]:
        """The projections `names` of `x`: "query", "key" and "value" to heads of `size` numbers.

        Queries and keys are normalised, if asked, and rotated by `rotation`. With `width` it is the
        projection "out", of all heads in `x` to `width` numbers.
        """
        options: dict[str, Any] = {"kernel_init": self.kernel_init, "dtype": self.dtype}
        if width is not None:
            options |= {"kernel_init": self.out_init or self.kernel_init}
            return [Dense(width, 2, self.use_bias, **options, name="out")(x)]
        if x.ndim != 3:
            raise ValueError(
                f"x has the shape {x.shape}, but must be [B, T, D]: one example alone is a batch "
                "of one, as in x[None]"
            )
        size = size or self.head_dim
        if size is None and x.shape[-1] % self.num_heads:
            raise ConfigError(
                f"vectors of {x.shape[-1]} numbers are not divisible by num_heads="
                f"{self.num_heads}: choose a divisor, or give head_dim"
            )
        size = size or x.shape[-1] // self.num_heads
        kv_heads = self.num_kv_heads or self.num_heads
        shapes = {
            "query": (self.num_heads, size),
            "key": (kv_heads, size),
            "value": (kv_heads, self.value_head_dim or size),
        }
        has_bias = self.use_bias if self.qkv_bias is None else self.qkv_bias
        outputs = {}
        for name in names:
            out = Dense(shapes[name], 1, has_bias, **options, name=name)(x)
            if self.query_key_norm and name != "value":
                norm = self.query_norm if name == "query" else self.key_norm
                rows = out.reshape(*out.shape[:-2], -1) if self.norm_over_heads else out
                out = norm(rows).reshape(out.shape)
            if rotation is not None and name != "value":
                out = rotate(out, rotation)
            outputs[name] = out
        for name, out in outputs.items():
            outputs[name] = tap(self, TAPS[name], out)
        return list(outputs.values())

    def attend(
        self,
        q: Float[Array, "R T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        mask: AttentionMask,
        bias: Float[Array, "_ N Q S"] | None,
        dropout_rng: DropoutRng | None,
    ) -> Float[Array, "R T N Hv"]:
        """Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V of each head (equation 1)."""
        options: dict[str, Any] = {"scale": 1.0 / math.sqrt(self.query_scalar or q.shape[-1])}
        options |= {} if self.softcap is None else {"softcap": self.softcap}
        if self.attention_fn is reference:  # no other function keeps the weights
            options["on_weights"] = partial(tap, self, "weights")
        dropout = self.dropout.at(dropout_rng, len(q)) if self.dropout_rate else None
        beams = len(q) // max(len(k), 1)  # their queries are further ones of a sentence
        check_mask(mask, (len(k), beams * q.shape[1], k.shape[1]))
        attention_fn = self.attention_fn
        if mask.from_cache or beams > 1:
            attention_fn = partial(fold_beams, attention_fn)
        has_mesh = not jax.sharding.get_abstract_mesh().empty
        q, k, v = divide_heads(q, k, v) if has_mesh else (q, k, v)
        heads = attention_fn(q, k, v, mask, bias=bias, dropout=dropout, **options)
        return gather_heads(heads) if has_mesh else heads
