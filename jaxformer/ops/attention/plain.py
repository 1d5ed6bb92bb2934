"""Attention as the paper writes it, for readers and for tests; `reference` is what runs."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.ops.dropout import DropoutMask
from jaxformer.ops.masks import MASKED_LOGIT, AttentionMask


def plain(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: DropoutMask | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N Hv"]:
    """softmax(q k^T * scale) v (Vaswani et al. 2017, equation 1), computed in float32.

    >>> q, k = jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 3, 1, 4))  # all weights are 1/3
    >>> v = jnp.array([1.0, 2.0, 6.0]).reshape(1, 3, 1, 1)
    >>> plain(q, k, v, AttentionMask(), scale=0.5)[0, :, 0, 0].round(4)  # the mean of v
    Array([3., 3.], dtype=float32)
    """
    dtype = v.dtype
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    queries_per_key = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, queries_per_key, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * scale
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    allowed = mask.materialize(q.shape[1], k.shape[1])
    if allowed is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        weights = jax.nn.softmax(jnp.where(allowed, logits, MASKED_LOGIT), axis=-1)
        weights = jnp.where(allowed, weights, 0.0)  # zeros for a query without keys
    if dropout is not None:
        weights = dropout(weights)
    return jnp.einsum("bnts,bsnh->btnh", weights, v).astype(dtype)
