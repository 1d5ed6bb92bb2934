"""JAX's own `jax.nn.dot_product_attention`, compiled by XLA on every platform."""

import jax
import jax.numpy as jnp

from jaxformer.dropout import Dropout
from jaxformer.kernels.call import Call, Machine, refuse, refuse_dropout, refuse_value_size
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

    Raises `ConfigError` for what JAX's function cannot do: dropout on the weights, and values of
    another size than the keys.
    """
    refuse("xla", xla_refusals(Call.of(q, k, v, mask, bias, dropout), Machine.here()))
    # Never is_causal: JAX anchors it at the top left, which is wrong with a cache.
    allowed = mask.dense(q.shape[1], k.shape[1])
    out = jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=allowed, scale=scale, implementation="xla"
    )
    if allowed is None:
        return out
    some = jnp.moveaxis(allowed.any(-1), 1, 2)[..., None]  # [B or 1, T, 1, 1]
    return jnp.where(some, out, 0)


def xla_refusals(call: Call, machine: Machine) -> list[str]:
    """Why the xla kernel cannot compute `call` on `machine`; empty where it can."""
    return refuse_dropout(call) + refuse_value_size(call)
