"""The product of vectors with a matrix, as XLA makes it and its gradients fastest."""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

Axes = tuple[Sequence[int], Sequence[int]]

# XLA on a CPU reads the matrix that a single row meets with one thread, but those of a batch with
# several: with two on 0.10 from two parts on, on 0.12 from four.
_PARTS = 4


def product(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: tuple[Axes, Axes],
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """`jax.lax.dot_general` of the last axes of `x` with the first of `kernel`, in matrices.

    For `dot_general=` of Flax's dense layers. Raises `ValueError` for other axes.
    """
    (mine, its), batch = dimension_numbers
    count = len(mine)
    last, first = tuple(range(x.ndim - count, x.ndim)), tuple(range(count))
    if (tuple(mine), tuple(its)) != (last, first) or any(batch):
        raise ValueError(
            f"axes {tuple(mine)} of x {x.shape} were to meet {tuple(its)} of the kernel "
            f"{kernel.shape} with the batch axes {tuple(map(tuple, batch))}, but only the last axes"
            " can meet the first, without batch axes: use jax.lax.dot_general"
        )
    # With more than two axes XLA on a CPU transposes the result's gradient, by a copy, before it
    # makes the kernel's gradient of it.
    size = math.prod(kernel.shape[:count])
    rows, matrix = x.reshape(-1, size), kernel.reshape(size, -1)
    multiply = partial(jnp.matmul, precision=precision)
    if rows.shape[0] == 1 and size % _PARTS == 0:
        parted = partial(_in_parts, precision=precision)
        found = jax.lax.platform_dependent(rows, matrix, cpu=parted, default=multiply)
    else:
        found = multiply(rows, matrix)
    return found.reshape(*x.shape[: x.ndim - count], *kernel.shape[count:])


def _in_parts(row: jax.Array, matrix: jax.Array, precision: jax.lax.PrecisionLike) -> jax.Array:
    """`row` [1, I] times `matrix` [I, O], as the sum of what each part of I gives."""
    row, matrix = row.reshape(_PARTS, 1, -1), matrix.reshape(_PARTS, -1, matrix.shape[1])
    exact = jnp.promote_types(row.dtype, jnp.float32)
    found = jnp.matmul(row, matrix, precision=precision, preferred_element_type=exact)
    return found.sum(0).astype(row.dtype)
