"""Arrays filled up with zeros."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped


def pad_to(x: Shaped[Array, "..."], axis: int, size: int) -> Shaped[Array, "..."]:
    """`x` with zeros at the end of `axis` until it has at least `size`.

    >>> pad_to(jnp.array([[3, 5]]), 1, 4)
    Array([[3, 5, 0, 0]], dtype=int32)
    """
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, max(size - x.shape[axis], 0))
    return jnp.pad(x, widths)
