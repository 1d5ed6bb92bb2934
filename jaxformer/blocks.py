"""The residual block, and the encoder and decoder as stacks of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer import cache as caches
from jaxformer.attention import MultiHeadAttention
from jaxformer.cache import Cache, KeysValues, Stored
from jaxformer.config import ConfigError, TransformerConfig
from jaxformer.dropout import Dropout, Noise
from jaxformer.kernels import Kernel, reference
from jaxformer.layers import AddPositions, FeedForward, Norm, RelativeBias
from jaxformer.masks import Mask
from jaxformer.positions import alibi_bias

MakeBlock = Callable[[TransformerConfig, bool, Kernel], nn.Module]


class Block(nn.Module):
    """Self-attention, cross-attention if `cross`, feed-forward; each with residual and norm.

    Post-norm (Vaswani et al. 2017, section 3.1): x = norm(x + dropout(f(x))). Pre-norm:
    x = x + dropout(f(norm(x))).
    """

    config: TransformerConfig
    cross: bool = False
    kernel: Kernel = reference

    def setup(self):
        config = self.config
        self.attention = MultiHeadAttention(config, self.kernel)
        self.attention_norm = Norm(config)
        if self.cross:
            self.cross_attention = MultiHeadAttention(config, self.kernel)
            self.cross_attention_norm = Norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = Norm(config)

    def __call__(
        self,
        x: jax.Array,
        mask: Mask,
        *,
        positions: jax.Array,
        bias: jax.Array | None = None,
        memory: KeysValues | None = None,
        memory_mask: Mask | None = None,
        past: Stored | None = None,
        noise: Noise | None = None,
    ) -> tuple[jax.Array, Stored | None]:
        """`x` [R, T, D] one block further, and `past` with the keys and values of `x` added.

        Without `past` the block attends within `x`; with it, to all that is stored there, where
        x's first token stands at `mask.offset`. `memory` [B, S, K, H] feeds the
        cross-attention.
        """
        h = self._enter(self.attention_norm, x)
        kv = self.attention.keys_values(h, positions)
        if past is not None:
            past = caches.write(past, kv, mask.offset)
            kv = caches.read(past)
        y = self.attention(h, kv, mask, positions=positions, bias=bias, noise=noise)
        x = self._leave(self.attention_norm, x, y, noise)
        if self.cross:
            h = self._enter(self.cross_attention_norm, x)
            y = self.cross_attention(h, memory, memory_mask, noise=noise)
            x = self._leave(self.cross_attention_norm, x, y, noise)
        h = self._enter(self.feed_forward_norm, x)
        y = self.feed_forward(h, noise)
        return self._leave(self.feed_forward_norm, x, y, noise), past

    def _enter(self, norm: Norm, x: jax.Array) -> jax.Array:
        return norm(x) if self.config.norm_placement == "pre" else x

    def _leave(self, norm: Norm, x: jax.Array, y: jax.Array, noise: Noise | None) -> jax.Array:
        x = x + Dropout(noise, "/".join(norm.path), self.config.dropout_rate)(y)
        return norm(x) if self.config.norm_placement == "post" else x


def _with_attention_again(config: TransformerConfig, cross: bool, kernel: Kernel) -> Block:
    """A `Block` that keeps of each attention only what goes in and what comes out."""

    def again(q, k, v, mask, *, scale, bias=None, dropout=None):
        def attend(q, k, v, bias):
            return kernel(q, k, v, mask, scale=scale, bias=bias, dropout=dropout)

        return jax.checkpoint(attend)(q, k, v, bias)

    return Block(config, cross, again)


def _is_product_with_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Attention's own products have rows and heads as batch dimensions.

    Those with weights have none, or one where each group of a mesh has a copy of the weights.
    """
    if primitive is not jax.lax.dot_general_p:
        return False
    _, (batch, _) = params["dimension_numbers"]
    return len(batch) <= 1


REMAT: dict[str, MakeBlock] = {
    "none": Block,
    "attention": _with_attention_again,
    "matmuls": nn.remat(Block, policy=_is_product_with_weights),
    "blocks": nn.remat(Block),
}
"""Blocks by what they keep for the backward pass; the rest they compute again (Chen et al. 2016).

Each keeps less than the one before: everything; all but attention's scores and weights; the
products with weights alone (JAX's policy `dots_with_no_batch_dims_saveable`); the input alone
(`nothing_saveable`). The gradient is the same.
"""


class Stack(nn.Module):
    """Positions, then `num_layers` blocks, then a norm if the blocks are pre-norm.

    `block` makes one of them, as those of `REMAT` do; a block of one's own is called as `Block` is.
    """

    config: TransformerConfig
    num_layers: int
    cross: bool = False
    kernel: Kernel = reference
    block: MakeBlock = Block

    def setup(self):
        config = self.config
        if self.num_layers < 1:
            raise ConfigError(
                f"the {self.name} has num_{self.name}_layers={self.num_layers}, but this model "
                "needs at least 1: give more, or build a model without it"
            )
        self.positions = AddPositions(config)
        if config.positions == "relative":
            self.relative_bias = RelativeBias(config)
        self.blocks = [self.block(config, self.cross, self.kernel) for _ in range(self.num_layers)]
        if config.normalize_embeddings:
            self.embedding_norm = Norm(config)
        if config.norm_placement == "pre":
            self.final_norm = Norm(config)

    def __call__(
        self,
        x: jax.Array,
        mask: Mask,
        *,
        positions: jax.Array | None = None,
        cache: Cache | None = None,
        memory: tuple[KeysValues, ...] = (),
        memory_mask: Mask | None = None,
        noise: Noise | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """`x` [R, T, D] (embeddings) through the stack, and the cache with its tokens added.

        `positions` [T] or [B, T] default to 0, 1, ... after the tokens already in `cache`.
        """
        length = x.shape[1] if cache is None else cache.length
        queries = mask.offset + jnp.arange(x.shape[1])
        positions = queries if positions is None else positions
        bias = self._bias(queries, jnp.arange(length), mask.causal)
        x = self.positions(x, positions, length)
        if self.config.normalize_embeddings:
            x = self.embedding_norm(x)
        x = Dropout(noise, "/".join((*self.path, "input")), self.config.dropout_rate)(x)
        layers = []
        for i, block in enumerate(self.blocks):
            x, past = block(
                x,
                mask,
                positions=positions,
                bias=bias,
                memory=memory[i] if self.cross else None,
                memory_mask=memory_mask,
                past=None if cache is None else cache.past(i),
                noise=noise,
            )
            layers.append(past)
        if self.config.norm_placement == "pre":
            x = self.final_norm(x)
        if cache is not None:
            cache = cache.extended(tuple(layers), x.shape[1])
        return x, cache

    def _bias(self, queries: jax.Array, keys: jax.Array, causal: bool) -> jax.Array | None:
        """What distance adds to the logits of every layer's self-attention, [1, N, T, S]."""
        if self.config.positions == "alibi":
            return alibi_bias(self.config.num_heads, queries, keys)
        if self.config.positions == "relative":
            return self.relative_bias(queries, keys, causal)
        return None

    def memory_keys_values(self, memory: jax.Array) -> tuple[KeysValues, ...]:
        """Each block's cross-attention keys and values of `memory` [B, S, D]."""
        return tuple(block.cross_attention.keys_values(memory) for block in self.blocks)
