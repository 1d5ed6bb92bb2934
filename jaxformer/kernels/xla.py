"""JAX's own `jax.nn.dot_product_attention`, compiled by XLA on every platform."""

import jax
import jax.numpy as jnp

from jaxformer.dropout import Dropout
from jaxformer.masks import Mask


def xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    scale: float,
    bias: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """Attention [B, T, N, Hv] by `jax.nn.dot_product_attention(implementation="xla")`.

    Raises `ValueError` for what JAX's function cannot do: dropout on the weights, and values of
    another size than the keys.
    """
    if dropout is not None and dropout.noise is not None and dropout.rate > 0:
        raise ValueError(
            f"the xla kernel has no dropout on attention weights, but rate={dropout.rate} was "
            "given: use the reference kernel or attention_dropout_rate=0"
        )
    if v.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"the xla kernel needs values of the keys' size, but head_dim={k.shape[-1]} and "
            f"value_head_dim={v.shape[-1]}: use the reference kernel"
        )
    # Never is_causal: JAX anchors it at the top left, which is wrong with a cache.
    allowed = mask.dense(q.shape[1], k.shape[1])
    out = jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=allowed, scale=scale, implementation="xla"
    )
    if allowed is None:
        return out
    some = jnp.moveaxis(allowed.any(-1), 1, 2)[..., None]  # [B or 1, T, 1, 1]
    return jnp.where(some, out, 0)
