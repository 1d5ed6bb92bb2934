"""LayerNorm and RMSNorm over the last axis, as XLA computes and differentiates them best."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32

from jaxformer.ops.recompute import recompute_on_gpu


def layer_norm(
    x: Float[Array, "*shape D"],
    scale: Float32[Array, " D"],
    bias: Float32[Array, " D"] | None = None,
    *,
    eps: float,
) -> Float[Array, "*shape D"]:
    """(x - mean) / sqrt(variance + eps) * scale + bias (Ba et al. 2016), in the type of `x`.

    It is computed in float32. The plain twin is that formula, with `jnp.mean` and `jnp.var`.

    >>> layer_norm(jnp.array([3.0, 7.0]), jnp.ones(2), jnp.array([0.0, 10.0]), eps=0.0)
    Array([-1., 11.], dtype=float32)
    """
    vectors = (scale,) if bias is None else (scale, bias)
    return _norm(x, *vectors, eps=eps, centered=True)


def rms_norm(
    x: Float[Array, "*shape D"], scale: Float32[Array, " D"], *, eps: float
) -> Float[Array, "*shape D"]:
    """x / sqrt(mean of squares + eps) * scale (Zhang & Sennrich 2019), in the type of `x`.

    It is computed in float32. The plain twin is that formula, with `jnp.mean`.

    >>> rms_norm(jnp.array([1.0, 7.0]), jnp.ones(2), eps=0.0)  # the mean of 1 and 49 is 25
    Array([0.2, 1.4], dtype=float32)
    """
    return _norm(x, scale, eps=eps, centered=False)


def _norm(x: Array, *vectors: Array, eps: float, centered: bool) -> Array:
    """The norm of `x` times the first of `vectors`, plus the second one where there are two."""

    def rows_norm(x: Array, *vectors: Array) -> Array:
        as_row = partial(jnp.expand_dims, axis=tuple(range(x.ndim - 1)))
        y, _ = normalize(x.astype(jnp.float32), eps, centered)
        y = y * as_row(vectors[0])
        return (y + as_row(vectors[1]) if len(vectors) > 1 else y).astype(x.dtype)

    def single_row_norm(x: Array, *vectors: Array) -> Array:
        # XLA for a GPU makes one kernel of a norm, but three if it has one row alone.
        rows = x.reshape(1, -1) + np.array([[0], [1]], x.dtype)
        return jax.lax.slice_in_dim(rows_norm(rows, *vectors), 0, 1).reshape(x.shape)

    twin = single_row_norm if x.size == x.shape[-1] else None
    return recompute_on_gpu(rows_norm, x, *vectors, gpu_twin=twin)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def normalize(
    x: Float[Array, "*shape D"], eps: float, centered: bool
) -> tuple[Float[Array, "*shape D"], Float[Array, "*shape 1"]]:
    """(x - mean) / sqrt(variance + eps) over the last axis, and 1 / sqrt(variance + eps).

    Without the mean if not `centered`. The derivative is written out. With the automatic one, XLA
    on a CPU recomputes the residual sums of all later layers in each weight gradient, which costs
    time quadratic in depth.
    """
    if centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse, inverse


@normalize.defjvp
def _normalize_jvp(eps, centered, primals, tangents):
    (x,), (dx,) = primals, tangents
    y, inverse = normalize(x, eps, centered)
    along = jnp.mean(y * dx, axis=-1, keepdims=True)
    dy = dx - y * along
    if centered:
        dy = dy - jnp.mean(dx, axis=-1, keepdims=True)
    return (y, inverse), (dy * inverse, -along * inverse * inverse)
