"""One-hot vectors that lie one after the other in the last axis."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxformer.ops.tpu_tiles import LANES


def flat_one_hot(x: Int[Array, "*shape L"], classes: int) -> Bool[Array, "*shape L*classes"]:
    """Element l * `classes` + c is whether x[l] is c; the numbers are from -2^24 to 2^24.

    The plain twin is `one_hot_plainly`. Its last axis has `classes` elements, each row of which
    takes 128 lanes on a TPU. There a product with a matrix of zeros and ones repeats the numbers in
    their places, exactly.

    >>> flat_one_hot(jnp.array([2, 0]), 3)
    Array([False, False,  True,  True, False, False], dtype=bool)
    """
    by_product = partial(one_hot_by_product, classes=classes)
    plain = partial(one_hot_plainly, classes=classes)
    return jax.lax.platform_dependent(x, tpu=by_product, default=plain)


def one_hot_plainly(x: Int[Array, "*shape L"], classes: int) -> Bool[Array, "*shape L*classes"]:
    """`flat_one_hot` by a comparison of each number with each class."""
    numbers = jnp.expand_dims(jnp.arange(classes), range(x.ndim))
    return (x[..., None] == numbers).reshape(*x.shape[:-1], -1)


def one_hot_by_product(x: Int[Array, "*shape L"], classes: int) -> Bool[Array, "*shape L*classes"]:
    """`flat_one_hot` by products of 128 numbers at a time."""
    *shape, length = x.shape
    widths = [(0, 0)] * x.ndim
    widths[-1] = (0, -length % LANES)
    x = jnp.pad(x, widths)
    parts = x.reshape(*shape, -1, LANES).astype(jnp.float32)
    places = jnp.arange(LANES * classes)
    is_source = jnp.arange(LANES)[:, None] == places[None] // classes
    repeated = jnp.matmul(parts, is_source.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    numbers = jnp.expand_dims((places % classes).astype(jnp.float32), range(x.ndim))
    return (repeated == numbers).reshape(*shape, -1)[..., : length * classes]
