"""Scaled dot-product attention as the paper writes it."""

import jax
import jax.numpy as jnp

from jaxformer.dropout import Dropout
from jaxformer.masks import Mask

# Finite, so that a row without any key stays finite in the forward and the backward pass.
_NEGATIVE = -1e30


def attention_weights(
    q: jax.Array,
    k: jax.Array,
    mask: Mask,
    *,
    scale: float,
    bias: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T * scale + bias) over the keys, float32 [B, N, T, S].

    Each row sums to one, or is zero where the mask allows no key (Vaswani et al. 2017, eq. 1).
    """
    batch, queries, heads, size = q.shape
    keys, groups = k.shape[1:3]
    # As XLA multiplies matrices fastest, and as a cache keeps them: there these transposes vanish.
    q, k = jnp.swapaxes(q, 1, 2).reshape(batch, groups, -1, size), k.transpose(0, 2, 3, 1)
    logits = jnp.einsum("BKQH,BKHS->BKQS", q, k, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, heads, queries, keys) * scale
    if bias is not None:
        logits = logits + bias
    allowed = mask.dense(queries, keys)
    if allowed is None:
        return jax.nn.softmax(logits, axis=-1)
    weights = jax.nn.softmax(jnp.where(allowed, logits, _NEGATIVE), axis=-1)
    return jnp.where(allowed, weights, 0.0)


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    scale: float,
    bias: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """Attention [B, T, N, Hv] with the weights [B, N, T, S] written out in full."""
    weights = attention_weights(q, k, mask, scale=scale, bias=bias)
    if dropout is not None:
        weights = dropout(weights)
    batch, heads, queries, keys = weights.shape
    groups = v.shape[2]
    weights = weights.astype(v.dtype).reshape(batch, groups, -1, keys)
    out = jnp.einsum("BKQS,BKSH->BKQH", weights, jnp.swapaxes(v, 1, 2))
    return jnp.swapaxes(out.reshape(batch, heads, queries, -1), 1, 2)
