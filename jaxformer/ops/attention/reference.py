"""Scaled dot-product attention, softmax(q k^T * scale) v (Vaswani et al. 2017, equation 1)."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from jaxformer.ops.attention.grouped import query_key_products, weighted_values
from jaxformer.ops.dropout import Dropout
from jaxformer.ops.masks import AttentionMask, check_mask

# Finite, so that a row without any key stays finite in the forward and the backward pass.
_NEGATIVE = -1e30


def reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: Dropout | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention with the weights [B, N, T, S] written out in full."""
    weights = attention_weights(q, k, mask, scale=scale, bias=bias)
    if dropout is not None:
        weights = dropout(weights)
    return weighted_values(weights, v)


def attention_weights(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
) -> Float32[Array, "B N T S"]:
    """softmax(q k^T * scale + bias) over the keys.

    The weights of a query sum to one, or are zero where the mask allows no key.
    """
    check_mask(mask)
    logits = query_key_products(q, k) * scale
    if bias is not None:
        logits = logits + bias
    allowed = mask.materialize(q.shape[1], k.shape[1])
    if allowed is None:
        return jax.nn.softmax(logits, axis=-1)
    weights = jax.nn.softmax(jnp.where(allowed, logits, _NEGATIVE), axis=-1)
    return jnp.where(allowed, weights, 0.0)
