"""The residual block, and blocks whose backward pass recomputes a part of it."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config import TransformerConfig
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.layers import FeedForward, Norm
from jaxformer.nn.positions import Rotation
from jaxformer.nn.taps import tap
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.ops.attention.spec import FLASH_RESIDUALS
from jaxformer.ops.beam_cache import KeyValue, LayerCache, read, write
from jaxformer.ops.dropout import Dropout, DropoutRng
from jaxformer.ops.masks import AttentionMask

MakeBlock = Callable[[TransformerConfig, bool, AttentionFn], nn.Module]
"""block(config, cross, attention_fn) -> a module that is called as `Block` is."""


class Block(nn.Module):
    """Self-attention, cross-attention if `cross`, feed-forward; each with residual and norm.

    Post-norm (Vaswani et al. 2017, section 3.1): x = norm(x + dropout(f(x))). Pre-norm:
    x = x + dropout(f(norm(x))). Sandwich (Ding et al. 2021): x = x + dropout(norm(f(norm(x)))).
    With `config.parallel_residual` the feed-forward network reads the block's input, as
    self-attention does (Wang & Komatsuzaki 2021). Values to read and replace: x [R, T, D] after
    each of the three, `after_attention`, `after_cross_attention` and
    `after_feed_forward`.

    >>> config = jf.TransformerConfig(vocab_size=11, d_model=8, d_ff=12, num_heads=2)
    >>> block, causal = jf.Block(config), jf.AttentionMask(causal=True)
    >>> x = jnp.ones((3, 5, 8))  # [B, T, D]
    >>> shapes = jax.eval_shape(lambda: block.init_with_output(jax.random.key(0), x, causal))
    >>> (out, _), variables = shapes
    >>> out.shape
    (3, 5, 8)
    >>> sorted(variables["params"])
    ['attention', 'attention_norm', 'feed_forward', 'feed_forward_norm']
    """

    config: TransformerConfig
    cross: bool = False
    attention_fn: AttentionFn = reference

    def setup(self) -> None:
        config = self.config
        self.attention: MultiHeadAttention = MultiHeadAttention(config, self.attention_fn)
        self.attention_norm: Norm = Norm(config)
        if self.cross:
            self.cross_attention: MultiHeadAttention = MultiHeadAttention(config, self.attention_fn)
            self.cross_attention_norm: Norm = Norm(config)
        self.feed_forward: FeedForward = FeedForward(config)
        self.feed_forward_norm: Norm = Norm(config)
        if config.norm_placement == "sandwich":
            self.attention_post_norm: Norm = Norm(config)
            if self.cross:
                self.cross_attention_post_norm: Norm = Norm(config)
            self.feed_forward_post_norm: Norm = Norm(config)

    def __call__(
        self,
        x: Float[Array, "R T D"],
        mask: AttentionMask,
        *,
        rotation: Rotation | None = None,
        bias: Float[Array, "1 N T S"] | None = None,
        encoder_kv: KeyValue | None = None,
        encoder_mask: AttentionMask | None = None,
        layer_cache: LayerCache | None = None,
        dropout_rng: DropoutRng | None = None,
    ) -> tuple[Float[Array, "R T D"], LayerCache | None]:
        """`x` after the block, and `layer_cache` with the keys and values of `x` added.

        Without `layer_cache` the tokens of `x` attend to each other; with it, to all tokens in it,
        and the first token of `x` has the position `mask.offset`. `rotation` and `bias` are those
        of the position scheme, for self-attention. `encoder_kv` [B, S, K, H] and `encoder_mask` are
        for the cross-attention. R is B, or B times the number of beams.
        """
        entered = x
        h = self._before("attention", x)
        kv = self.attention.keys_values(h, rotation)
        if layer_cache is not None:
            layer_cache = write(layer_cache, kv, mask.offset)
            kv = read(layer_cache)
        y = self.attention(h, kv, mask, rotation=rotation, bias=bias, dropout_rng=dropout_rng)
        x = tap(self, "after_attention", self._after("attention", x, y, dropout_rng))
        if self.cross:
            h = self._before("cross_attention", x)
            y = self.cross_attention(h, encoder_kv, encoder_mask, dropout_rng=dropout_rng)
            x = self._after("cross_attention", x, y, dropout_rng)
            x = tap(self, "after_cross_attention", x)
        h = self._before("feed_forward", entered if self.config.parallel_residual else x)
        y = self.feed_forward(h, dropout_rng)
        x = tap(self, "after_feed_forward", self._after("feed_forward", x, y, dropout_rng))
        return x, layer_cache

    def _before(self, part: str, x: jax.Array) -> jax.Array:
        """What the sub-layer `part` reads."""
        return x if self.config.norm_placement == "post" else getattr(self, f"{part}_norm")(x)

    def _after(
        self, part: str, x: jax.Array, y: jax.Array, dropout_rng: DropoutRng | None
    ) -> jax.Array:
        """`x` with the output `y` of the sub-layer `part`."""
        norm, placement = getattr(self, f"{part}_norm"), self.config.norm_placement
        if placement == "sandwich":
            y = getattr(self, f"{part}_post_norm")(y)
        x = x + Dropout(dropout_rng, "/".join(norm.path), self.config.dropout_rate)(y)
        return norm(x) if placement == "post" else x


def _recompute_attention(
    config: TransformerConfig, cross: bool, attention_fn: AttentionFn
) -> Block:
    """A `Block` that keeps only the inputs and outputs of its attention functions."""

    def recomputed(q, k, v, mask, *, scale, bias=None, dropout=None, **options):
        def attend(q, k, v, bias):
            return attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)

        return jax.checkpoint(attend)(q, k, v, bias)

    return Block(config, cross, recomputed)


def _is_matmul_with_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether the product has at most one batch dimension.

    Attention's own products have two, rows and heads. Those with weights have none, or one where
    each group of a mesh has a copy of the weights.
    """
    if primitive is not jax.lax.dot_general_p:
        return False
    _, (batch, _) = params["dimension_numbers"]
    return len(batch) <= 1


def _remat(policy: Callable[..., bool] | None = None) -> MakeBlock:
    def make(config: TransformerConfig, cross: bool, attention_fn: AttentionFn) -> nn.Module:
        # In a loop XLA cannot merge the two computations, so nothing has to prevent it.
        block = nn.remat(Block, policy=policy, prevent_cse=not config.scan_layers)
        return block(config, cross, attention_fn)

    return make


REMAT: dict[str, MakeBlock] = {
    "none": Block,
    "attention": _recompute_attention,
    "matmuls": _remat(_is_matmul_with_weights),
    "all_but_attention": _remat(jax.checkpoint_policies.save_only_these_names(FLASH_RESIDUALS)),
    "blocks": _remat(),
}
"""Blocks by what the backward pass recomputes (Chen et al. 2016); the gradient is the same.

"none" keeps everything. "attention" recomputes the attention's scores and weights. "matmuls" keeps
only the products with weights (JAX's `dots_with_no_batch_dims_saveable`), "blocks" only each
block's input (`nothing_saveable`). "all_but_attention" also keeps the result of attention, where a
flash attention function computes it.
"""
