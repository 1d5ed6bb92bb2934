"""Multi-head attention in three parts: keys and values of something, attend to it, out."""

import math

import jax
from flax import linen as nn

from jaxformer.cache import KeysValues
from jaxformer.config import TransformerConfig
from jaxformer.dropout import Dropout, Noise
from jaxformer.kernels import Kernel, attention_weights, reference
from jaxformer.layers import dense_init, residual_init
from jaxformer.masks import Mask
from jaxformer.positions import rotary
from jaxformer.products import product


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) of Vaswani et al. 2017, section 3.2.2.

    Self-attention, cross-attention and cached decoding differ only in where the keys and values
    come from. With `mutable=["intermediates"]` the weights [B, N, T, S] are recorded under
    `attention_weights`.
    """

    config: TransformerConfig
    kernel: Kernel = reference

    def setup(self):
        config = self.config
        self.query = self._projection(config.num_heads, config.key_size)
        self.key = self._projection(config.kv_heads, config.key_size)
        self.value = self._projection(config.kv_heads, config.value_size)
        self.out = nn.DenseGeneral(
            config.d_model,
            axis=(-2, -1),
            use_bias=config.use_bias,
            dtype=config.dtype,
            kernel_init=residual_init(config),
            dot_general=product,
        )

    def _projection(self, heads: int, size: int) -> nn.DenseGeneral:
        return nn.DenseGeneral(
            (heads, size),
            use_bias=self.config.use_bias,
            dtype=self.config.dtype,
            kernel_init=dense_init(self.config),
            dot_general=product,
        )

    def keys_values(self, x: jax.Array, positions: jax.Array | None = None) -> KeysValues:
        """Keys [B, S, K, H] and values [B, S, K, Hv] of `x` [B, S, D].

        `positions` [S] or [B, S] turn the keys when the config asks for rotary positions; None
        leaves them, as in cross-attention.
        """
        return KeysValues(self._turn(self.key(x), positions), self.value(x))

    def __call__(
        self,
        x: jax.Array,
        kv: KeysValues,
        mask: Mask,
        *,
        positions: jax.Array | None = None,
        bias: jax.Array | None = None,
        noise: Noise | None = None,
    ) -> jax.Array:
        """What `x` [R, T, D] gathers from `kv` [B, S, ...], as [R, T, D].

        R may be a multiple of B: the R/B rows of one sentence (its hypotheses) then share its
        keys and values as so many further queries. Of hypotheses with `ancestors` `mask` and `bias`
        are about one text.
        """
        q = self._turn(self.query(x), positions)
        shape = q.shape
        q = q.reshape(kv.key.shape[0], -1, *shape[2:])
        mask, bias = kv.spread(mask, bias, x.shape[1])
        scale = 1.0 / math.sqrt(self.config.key_size)
        if self.is_mutable_collection("intermediates"):
            weights = attention_weights(q, kv.key, mask, scale=scale, bias=bias)
            self.sow("intermediates", "attention_weights", weights)
        site = "/".join((*self.path, "weights"))
        dropout = Dropout(noise, site, self.config.attention_dropout_rate)
        gathered = self.kernel(q, kv.key, kv.value, mask, scale=scale, bias=bias, dropout=dropout)
        return self.out(gathered.reshape(*shape[:3], -1))

    def _turn(self, x: jax.Array, positions: jax.Array | None) -> jax.Array:
        if positions is None or self.config.positions != "rotary":
            return x
        return rotary(x, positions, self.config.rotary_base)
