"""The product of many vectors with a matrix, as XLA differentiates it fastest."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

Axes = tuple[Sequence[int], Sequence[int]]


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
    rows = x.reshape(-1, size)
    found = jnp.matmul(rows, kernel.reshape(size, -1), precision=precision)
    return found.reshape(*x.shape[: x.ndim - count], *kernel.shape[count:])
