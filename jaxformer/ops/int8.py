"""Matrices of 8-bit integers with a scale per output, and products with them.

The plain twin of `int8_matmul` is a float product of rows and matrix, both rounded by `quantize`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int8

_LARGEST = 127


@struct.dataclass
class QuantizedMatrix:
    """A matrix of 8-bit integers with one scale for each of O outputs.

    `values` [O, I] or [I, O] int8 has the I inputs on axis `inputs`; `scale` [O] is float32. The
    largest value of each output is 127 or -127.
    """

    values: jax.Array
    scale: jax.Array
    inputs: int = struct.field(pytree_node=False)

    @property
    def T(self) -> "QuantizedMatrix":  # noqa: N802  (the name of an array's transpose)
        """The transposed matrix; the inputs stay the inputs."""
        return QuantizedMatrix(self.values.T, self.scale, 1 - self.inputs)


def is_quantized(leaf: Any) -> bool:
    """Whether `leaf` is a `QuantizedMatrix`."""
    return isinstance(leaf, QuantizedMatrix)


def quantize_matrix(matrix: Float[Array, "rows columns"], inputs: int) -> QuantizedMatrix:
    """`matrix` in int8 per output, scale max / 127; the inputs are on axis `inputs`."""
    values, scale = _quantize(matrix, inputs)
    return QuantizedMatrix(values, scale.squeeze(inputs), inputs)


def take_rows(table: QuantizedMatrix, ids: jax.Array) -> Float[Array, "*shape I"]:
    """The rows of `table` [O, I] that belong to `ids` [...]."""
    return jnp.take(table.values, ids, axis=0) * jnp.take(table.scale, ids)[..., None]


def int8_matmul(x: Float[Array, "R I"], matrix: QuantizedMatrix) -> Float[Array, "R O"]:
    """`x`, each row rounded to 8 bits, times `matrix`; the sums of integers are exact."""
    values, scale = _quantize(x, 1)
    if len(x) == 1:  # XLA on a CPU takes 20 times as long for one row as for two
        values = jnp.pad(values, ((0, 1), (0, 0)))
    axes = ((1,), (matrix.inputs,)), ((), ())
    sums = jax.lax.dot_general(values, matrix.values, axes, preferred_element_type=jnp.int32)
    return sums[: len(x)].astype(jnp.float32) * scale * matrix.scale[None]


def _quantize(
    x: Float[Array, "rows columns"], axis: int
) -> tuple[Int8[Array, "rows columns"], Float[Array, "..."]]:
    """int8 values and a scale, whose product is about `x`; the scale has size 1 on `axis`."""
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(axis, keepdims=True) / _LARGEST
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(x / scale).astype(jnp.int8), scale
