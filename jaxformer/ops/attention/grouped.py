"""The two products of attention with grouped heads, in the layout that XLA multiplies fastest.

Head n of N belongs to key/value head n * K // N. The plain twins are one `einsum` each:

    logits = einsum("BTKGH,BSKH->BKGTS", q.reshape(B, T, K, N // K, H), k)
    out = einsum("BKGTS,BSKH->BTKGH", weights.reshape(B, K, N // K, T, S), v)

Here the G heads and T queries of a group are one axis Q of a plain batched matrix product, and the
transposes are those in which a cache stores keys and values, so that XLA removes them.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32


def query_key_products(
    q: Float[Array, "B T N H"], k: Float[Array, "B S K H"]
) -> Float32[Array, "B N T S"]:
    """q k^T of each head, summed in float32."""
    batch, queries, heads, size = q.shape
    keys, groups = k.shape[1:3]
    q, k = jnp.swapaxes(q, 1, 2).reshape(batch, groups, -1, size), k.transpose(0, 2, 3, 1)
    logits = jnp.einsum("BKQH,BKHS->BKQS", q, k, preferred_element_type=jnp.float32)
    return logits.reshape(batch, heads, queries, keys)


def weighted_values(
    weights: Float[Array, "B N T S"], v: Float[Array, "B S K Hv"]
) -> Float[Array, "B T N Hv"]:
    """The sum of the values, weighted for each head and query, in the dtype of `v`."""
    batch, heads, queries, keys = weights.shape
    weights = weights.astype(v.dtype).reshape(batch, v.shape[2], -1, keys)
    out = jnp.einsum("BKQS,BKSH->BKQH", weights, jnp.swapaxes(v, 1, 2))
    return jnp.swapaxes(out.reshape(batch, heads, queries, -1), 1, 2)
