"""Rows of arrays: sentences that leave a state of decoding, and sentences that enter it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int, Shaped

from jaxformer.ops.masks import AnyArray


def take_rows_of(x: Shaped[AnyArray, "*shape"] | int, rows: Int[AnyArray, " K"]) -> Any:
    """The K `rows` of `x` [B, ...]; a number is the same for all rows.

    >>> take_rows_of(jnp.array([[3, 4], [5, 6]]), jnp.array([1, 1, 0]))[:, 0]
    Array([5, 5, 3], dtype=int32)
    """
    return jnp.asarray(x)[rows] if jnp.ndim(x) else x


def put_rows_into(
    x: Shaped[AnyArray, "*shape"] | int,
    rows: Int[AnyArray, " K"],
    new: Shaped[AnyArray, "*new"] | int,
) -> jax.Array:
    """`x` [B, ...] with the K rows of `new` in `rows`; a row outside of it is left out.

    Raises `ValueError` for a number of all rows.

    >>> put_rows_into(jnp.zeros(3), jnp.array([2, 3]), jnp.array([5.0, 6.0]))
    Array([0., 0., 5.], dtype=float32)
    """
    if not jnp.ndim(x):
        raise ValueError(
            f"{x} is a number of all sentences, but sentences that enter have their own: give "
            "cache.truncate(lengths) with a length of each [B]"
        )
    return jnp.asarray(x).at[rows].set(new)
