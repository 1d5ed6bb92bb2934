"""Scaled dot-product attention, softmax(q k^T * scale) v (Vaswani et al. 2017, equation 1)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from jaxformer.ops.dense import matmul, summed_in_float32
from jaxformer.ops.dropout import DropoutMask
from jaxformer.ops.masks import MASKED_LOGIT, AttentionMask


def reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: DropoutMask | None = None,
    softcap: float | None = None,
    on_weights: Callable[[Float32[Array, "B N T S"]], Float32[Array, "B N T S"]] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attention that stores all weights [B, N, T, S], and passes them through `on_weights`.

    The weights of a query sum to one, or are zero where the mask allows no key. Logits and softmax
    are float32. The G = N / K heads and T queries of a key head are one axis Q of a batched matrix
    product, the fastest form for XLA. The transposes are those in which a cache stores keys and
    values, so that XLA removes them.

    >>> q, k = jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 3, 1, 4))  # all weights are 1/3
    >>> v = jnp.array([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1)
    >>> reference(q, k, v, AttentionMask(), scale=0.5)[0, :, 0, 0].round(4)  # the mean of v
    Array([3., 3.], dtype=float32)
    """
    (batch, queries, heads, size), (keys, groups) = q.shape, k.shape[1:3]
    allowed = mask.materialize(queries, keys)
    rows = heads // groups * queries
    q, k = jnp.swapaxes(q, 1, 2).reshape(batch, groups, rows, size), k.transpose(0, 2, 3, 1)
    logits = summed_in_float32(matmul, q, k)  # [B, K, Q, S]
    logits = logits.reshape(batch, heads, queries, keys) * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    if allowed is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        weights = jax.nn.softmax(jnp.where(allowed, logits, MASKED_LOGIT), axis=-1)
        weights = jnp.where(allowed, weights, 0.0)
    if on_weights is not None:
        weights = on_weights(weights)
    if dropout is not None:
        weights = dropout(weights)
    weights = weights.astype(v.dtype).reshape(batch, groups, rows, keys)
    out = matmul(weights, jnp.swapaxes(v, 1, 2))  # [B, K, Q, Hv]
    return jnp.swapaxes(out.reshape(batch, heads, queries, v.shape[-1]), 1, 2)
