"""The parts of a model, from its `TransformerConfig`; blocks whose backward pass recomputes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import linen as nn

from jaxformer.config import TransformerConfig
from jaxformer.nn.blocks import Block
from jaxformer.nn.layers import Embedding, Initializer, LMHead, Norm
from jaxformer.ops.attention import AttentionFn
from jaxformer.ops.attention.spec import FLASH_RESIDUALS
from jaxformer.ops.beam_cache import FoldBeams

MakeBlock = Callable[..., nn.Module]
"""block(**fields) -> a module that is called as `Block` is, from the fields of `Block`."""


@dataclass(frozen=True)
class Remat:
    """`Block` whose backward pass recomputes what `policy` does not save; None saves nothing."""

    policy: Callable[..., bool] | None = None

    def __call__(self, *, in_scan: bool = False, **fields: Any) -> nn.Module:
        """The block."""
        # In a loop XLA cannot merge the two computations, so nothing has to prevent it.
        return nn.remat(Block, policy=self.policy, prevent_cse=not in_scan)(**fields)


def make_block(
    config: TransformerConfig, cross: bool, attention_fn: AttentionFn, block: MakeBlock = Block
) -> nn.Module:
    """A `block` of the stack of `config`, with cross-attention if `cross`."""
    if isinstance(block, Remat):
        block = partial(block, in_scan=config.scan_layers)
    return block(
        num_heads=config.num_heads,
        d_ff=config.d_ff,
        cross=cross,
        head_dim=config.head_dim,
        value_head_dim=config.value_head_dim,
        dropout_rate=config.dropout_rate,
        norm_options=config.norm,
        attention_options=config.attention,
        feed_forward_options=config.feed_forward,
        use_bias=config.use_bias,
        attention_fn=FoldBeams(attention_fn),
        kernel_init=dense_init(config),
        out_init=residual_init(config),
        dtype=config.dtype,
    )


def make_norm(config: TransformerConfig) -> Norm:
    """A norm of the model of `config`."""
    return Norm(config.norm.kind, config.norm.eps, config.use_bias)


def make_embedding(
    config: TransformerConfig, vocab_size: int, zero_id: int | None = None
) -> Embedding:
    """A table of `vocab_size` vectors of the model of `config`."""
    return Embedding(
        vocab_size,
        config.d_model,
        config.embeddings.scale,
        zero_id,
        table_init(config),
        config.dtype,
    )


def make_lm_head(config: TransformerConfig) -> LMHead:
    """The output layer of the model of `config`."""
    return LMHead(config.vocab_size, config.output.bias, config.output.softcap, dense_init(config))


def dense_init(config: TransformerConfig) -> Initializer:
    """The initializer of projections: Glorot-uniform, or normal with deviation 0.02."""
    if config.initializer == "xavier":
        return nn.initializers.xavier_uniform()
    return nn.initializers.normal(0.02)


def residual_init(config: TransformerConfig) -> Initializer:
    """The initializer of projections into the residual (Radford et al. 2019, section 2.3)."""
    if config.initializer == "scaled_normal":
        blocks = config.num_encoder_layers + config.num_decoder_layers
        return nn.initializers.normal(0.02 / math.sqrt(2 * blocks))
    return dense_init(config)


def table_init(config: TransformerConfig) -> Initializer:
    """The initializer of tables with a row for each id or bucket."""
    deviation = config.d_model**-0.5 if config.initializer == "xavier" else 0.02
    return nn.initializers.normal(deviation)


def _recompute_attention(*, attention_fn: AttentionFn, **fields: Any) -> nn.Module:
    """A `Block` that keeps only the inputs and outputs of its attention functions."""

    def recomputed(q, k, v, mask, *, scale, bias=None, dropout=None, **options):
        def attend(q, k, v, bias):
            return attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)

        return jax.checkpoint(attend)(q, k, v, bias)

    return Block(attention_fn=recomputed, **fields)


def _is_matmul_with_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether the product has at most one batch dimension.

    Attention's own products have two, rows and heads. Those with weights have none, or one where
    each group of a mesh has a copy of the weights.
    """
    if primitive is not jax.lax.dot_general_p:
        return False
    _, (batch, _) = params["dimension_numbers"]
    return len(batch) <= 1


REMAT: dict[str, MakeBlock] = {
    "none": Block,
    "attention": _recompute_attention,
    "matmuls": Remat(_is_matmul_with_weights),
    "all_but_attention": Remat(jax.checkpoint_policies.save_only_these_names(FLASH_RESIDUALS)),
    "blocks": Remat(),
}
"""Blocks by what the backward pass recomputes (Chen et al. 2016); the gradient is the same.

"none" keeps everything. "attention" recomputes the attention's scores and weights. "matmuls" keeps
only the products with weights (JAX's `dots_with_no_batch_dims_saveable`), "blocks" only each
block's input (`nothing_saveable`). "all_but_attention" also keeps the result of attention, where a
flash attention function computes it.
"""
