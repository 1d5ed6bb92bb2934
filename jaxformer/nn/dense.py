"""Dense layers with several input or output axes."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.checks import Count
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.ops.dense import AdaptedMatrix, QuantizedMatrix, add_bias, dense

Initializer = nn.initializers.Initializer


class Dense(CheckedModule):
    """x W + b; the plain twin, with the same parameters, is Flax's `DenseGeneral`.

    >>> x = jnp.ones((2, 3, 4))
    >>> out, variables = Dense((5, 7)).init_with_output(jax.random.key(0), x)
    >>> out.shape, variables["params"]["bias"].shape
    ((2, 3, 5, 7), (5, 7))
    """

    features: Count | tuple[Count, ...] | None = None
    """The size of each output axis; None: it is given in the call."""
    num_inputs: Count = 1
    """The number of last axes of x that the product sums over."""
    use_bias: bool = True
    kernel_init: Initializer = nn.initializers.lecun_normal()
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "..."], features: int | tuple[int, ...] | None = None
    ) -> Float[Array, "..."]:
        """The outputs, of shape `features` in place of the last axes of `x`.

        `features` are the module's, or given here where the input decides them.
        """
        features = self.features if features is None else features
        if features is None:
            raise ValueError("features=None: give the sizes of the outputs to Dense or in the call")
        features = features if isinstance(features, tuple) else (features,)
        lead, inputs = x.shape[: -self.num_inputs], x.shape[-self.num_inputs :]

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            matrix = math.prod(inputs), math.prod(features)  # decides the deviation
            return self.kernel_init(key, matrix, dtype).reshape(shape)

        kernel: Any = self.get_variable("params", "kernel")
        if isinstance(kernel, AdaptedMatrix):
            kernel = nn.unbox(kernel)
        else:
            kernel = float_or_quantized(self, "kernel", init, (*inputs, *features))
        out = dense(x.astype(self.dtype), kernel, self.num_inputs).reshape(*lead, *features)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, features, jnp.float32)
            out = add_bias(out, bias)
        return out.astype(self.dtype)


def float_or_quantized(
    module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...]
) -> jax.Array | QuantizedMatrix:
    """The parameter `name` of `module`, or the quantised matrix in its place (see `quantize`)."""
    stored: Any = module.get_variable("params", name)
    if isinstance(stored, QuantizedMatrix):
        return stored
    return module.param(name, init, shape, jnp.float32)
