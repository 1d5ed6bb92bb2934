"""One-hot vectors side by side, by a comparison and by the product of a TPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.flat_one_hot import flat_one_hot, one_hot_by_product


@pytest.mark.parametrize(
    ("shape", "classes"), [((2, 3, 131), 5), ((7, 256), 3), ((2, 11), 2), ((3, 5), 1)]
)
def test_the_class_of_each_number_is_true_and_a_number_of_no_class_has_none(shape, classes, rng):
    x = rng.integers(-1, classes + 1, shape)
    x[0, 0] = 2**24 if x.ndim == 2 else -(2**24)
    expected = (x[..., None] == np.arange(classes)).reshape(*shape[:-1], -1)
    x = jnp.asarray(x, jnp.int32)
    assert np.array_equal(flat_one_hot(x, classes), expected)
    assert np.array_equal(one_hot_by_product(x, classes), expected)
