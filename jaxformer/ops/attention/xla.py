"""JAX's `jax.nn.dot_product_attention`, compiled by XLA on every platform."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.ops.attention.spec import (
    AttentionSpec,
    DeviceInfo,
    dropout_reasons,
    raise_unsupported,
    softcap_reasons,
    value_size_reasons,
)
from jaxformer.ops.dropout import Dropout
from jaxformer.ops.masks import AttentionMask


def xla(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: Dropout | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attention by `jax.nn.dot_product_attention(implementation="xla")`.

    Raises `ConfigError` for what JAX's function does not support: dropout on the weights, a soft
    cap, and values of another size than the keys.

    >>> q = k = jnp.zeros((1, 2, 1, 2))
    >>> v = jnp.array([[1.0, 10.0], [3.0, 30.0]]).reshape(1, 2, 1, 2)
    >>> xla(q, k, v, AttentionMask(causal=True), scale=0.5)[0, :, 0].round(4)
    Array([[ 1., 10.],
           [ 2., 20.]], dtype=float32)
    """
    spec = AttentionSpec.create(q, k, v, mask, bias, dropout, softcap)
    raise_unsupported("xla", xla_unsupported_reasons(spec, DeviceInfo.current()))
    # Without `is_causal`, which JAX counts from key 0: with a cache that is wrong.
    allowed = mask.materialize(q.shape[1], k.shape[1])
    out = jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=allowed, scale=scale, implementation="xla"
    )
    return out if allowed is None else zeros_without_keys(out, allowed)


def zeros_without_keys(out: Float[Array, "B T N Hv"], allowed: Array) -> Float[Array, "B T N Hv"]:
    """`out` with zeros for each query to which `allowed` [#B, 1, T, S] gives no key."""
    return jnp.where(jnp.moveaxis(allowed.any(-1), 1, 2)[..., None], out, 0)


def xla_unsupported_reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    """Why `xla` cannot compute `spec` on `device`; empty where it can."""
    return dropout_reasons(spec) + softcap_reasons(spec) + value_size_reasons(spec)
