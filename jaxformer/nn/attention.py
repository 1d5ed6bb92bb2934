"""Multi-head attention (Vaswani et al. 2017, section 3.2.2)."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config import TransformerConfig
from jaxformer.nn.layers import Norm, dense_init, residual_init
from jaxformer.nn.positions import Rotation, rotate
from jaxformer.nn.taps import tap
from jaxformer.ops import beam_cache
from jaxformer.ops.attention import AttentionFn, check_attention_fn, reference
from jaxformer.ops.beam_cache import KeyValue
from jaxformer.ops.dense import dense_dot_general
from jaxformer.ops.dropout import Dropout, DropoutRng
from jaxformer.ops.masks import AttentionMask, check_mask


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O.

    head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V). Self-attention, cross-attention and cached
    decoding differ only in where keys and values come from. Values to read and replace: `queries`
    [R, T, N, H], `keys` [B, S, K, H], `values` [B, S, K, Hv], `weights` [B, N, T, S] with
    `reference` only, `heads` [R, T, N, Hv], `output` [R, T, D].

    >>> config = jf.TransformerConfig(vocab_size=11, d_model=8, d_ff=12, num_heads=2)
    >>> attention = jf.MultiHeadAttention(config)
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

    config: TransformerConfig
    attention_fn: AttentionFn = reference

    def setup(self) -> None:
        config = self.config
        check_attention_fn(self.attention_fn)
        if config.query_key_norm:
            self.query_norm: Norm = Norm(config)
            self.key_norm: Norm = Norm(config)
        self.query: nn.DenseGeneral = self._projection(config.num_heads, config.key_size)
        self.key: nn.DenseGeneral = self._projection(config.kv_heads, config.key_size)
        self.value: nn.DenseGeneral = self._projection(config.kv_heads, config.value_size)
        self.out: nn.DenseGeneral = nn.DenseGeneral(
            config.d_model,
            axis=(-2, -1),
            use_bias=config.use_bias,
            dtype=config.dtype,
            kernel_init=residual_init(config),
            dot_general=dense_dot_general,
        )

    def _projection(self, heads: int, size: int) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            (heads, size),
            use_bias=self.config.has_qkv_bias,
            dtype=self.config.dtype,
            kernel_init=dense_init(self.config),
            dot_general=dense_dot_general,
        )

    def keys_values(self, x: Float[Array, "B S D"], rotation: Rotation | None = None) -> KeyValue:
        """Keys [B, S, K, H], rotated by `rotation`, and values [B, S, K, Hv] of `x`."""
        k = self.key(x)
        k = self.key_norm(k) if self.config.query_key_norm else k
        k, v = tap(self, "keys", rotate(k, rotation)), tap(self, "values", self.value(x))
        return KeyValue(k, v)

    def __call__(
        self,
        x: Float[Array, "R T D"],
        kv: KeyValue | None = None,
        mask: AttentionMask | None = None,
        *,
        rotation: Rotation | None = None,
        bias: Float[Array, "1 N T S"] | None = None,
        dropout_rng: DropoutRng | None = None,
    ) -> Float[Array, "R T D"]:
        """The output of attention from the tokens of `x` to `kv` [B, S, ...]; R is B, or B x beams.

        `kv` defaults to the keys and values of `x` (self-attention), `mask` to one that allows
        everything. The queries are rotated by `rotation`, and `bias` is added to the scaled logits.
        """
        kv = self.keys_values(x, rotation) if kv is None else kv
        mask = AttentionMask() if mask is None else mask
        check_mask(mask)
        q = self.query(x)
        q = rotate(self.query_norm(q) if self.config.query_key_norm else q, rotation)
        attend = self.attention_fn
        if attend is reference:
            attend = partial(reference, on_weights=partial(tap, self, "weights"))
        config = self.config
        cap = config.attention_softcap
        options = {} if cap is None else {"softcap": cap}
        name = "/".join((*self.path, "weights"))
        heads = beam_cache.attend(
            attend,
            tap(self, "queries", q),
            kv,
            mask,
            scale=config.attention_scale,
            bias=bias,
            dropout=Dropout(dropout_rng, name, config.attention_dropout_rate),
            **options,
        )
        return tap(self, "output", self.out(tap(self, "heads", heads)))
