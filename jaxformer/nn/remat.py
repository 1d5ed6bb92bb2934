"""Blocks by what their backward pass recomputes (Chen et al. 2016)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import linen as nn

from jaxformer.nn.blocks import Block
from jaxformer.ops.attention import AttentionFn
from jaxformer.ops.attention.kernel import FLASH_RESIDUALS
from jaxformer.ops.experts import EXPERT_PRODUCTS


def _remat(
    policy: Callable[..., bool] | None, *, layer: int | None = None, **fields: Any
) -> nn.Module:
    """A `Block` that recomputes what `policy` does not save; None saves nothing."""
    # In a loop XLA cannot merge the two computations, so nothing has to prevent it.
    in_scan = layer is None
    methods = ["__call__", "decode"]
    block = nn.remat(Block, policy=policy, prevent_cse=not in_scan, methods=methods)
    return block(layer=layer, **fields)


def _recompute_attention(*, attention_fn: AttentionFn, **fields: Any) -> nn.Module:
    """A `Block` that keeps only the inputs and outputs of its attention functions."""

    def recomputed(q, k, v, mask, *, scale, bias=None, dropout=None, **options):
        def attend(q, k, v, bias):
            return attention_fn(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)

        return jax.checkpoint(attend)(q, k, v, bias)

    return Block(attention_fn=recomputed, **fields)


def _is_matmul_with_weights(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether it is a product with at most one batch dimension.

    Attention's own products have two, rows and heads. Those with weights have none, or one where
    each group of a mesh has a copy of the weights.
    """
    if primitive is not jax.lax.dot_general_p:
        return False
    _, (batch, _) = params["dimension_numbers"]
    return len(batch) <= 1


_save_products = jax.checkpoint_policies.save_from_both_policies(
    _is_matmul_with_weights, jax.checkpoint_policies.save_only_these_names(EXPERT_PRODUCTS)
)

REMAT: dict[str, Callable[..., nn.Module]] = {
    "none": Block,
    "attention": _recompute_attention,
    "matmuls": partial(_remat, _save_products),
    "all_but_attention": partial(
        _remat, jax.checkpoint_policies.save_only_these_names(FLASH_RESIDUALS)
    ),
    "blocks": partial(_remat, None),
}
"""Makers of blocks by what the backward pass recomputes; the gradient is the same.

"none" keeps everything. "attention" recomputes the attention's scores and weights. "matmuls" keeps
only the products with weights (JAX's `dots_with_no_batch_dims_saveable`), "blocks" only each
block's input (`nothing_saveable`). "all_but_attention" also keeps the result of attention, where a
flash attention function computes it.
"""
