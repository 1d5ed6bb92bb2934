"""The norms of a block, of queries and keys, and at the end of a stack."""

from typing import Literal

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.checks import NonNegative
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.ops.norm import layer_norm, rms_norm


class Norm(CheckedModule):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last axis.

    >>> out, _ = Norm().init_with_output(jax.random.key(0), jnp.array([[3.0, 7.0]]))
    >>> out.round(3)  # mean 5, deviation 2
    Array([[-1.,  1.]], dtype=float32)
    """

    kind: Literal["layer", "rms"] = "layer"
    eps: NonNegative = 1e-6
    use_bias: bool = True
    """A LayerNorm has a bias."""

    @nn.compact
    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        """`x` normalised in float32, scaled and shifted, in the type of `x`."""
        size = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, size, jnp.float32)
        if self.kind == "rms":
            return rms_norm(x, scale, eps=self.eps)
        bias = None
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, size, jnp.float32)
        return layer_norm(x, scale, bias, eps=self.eps)
