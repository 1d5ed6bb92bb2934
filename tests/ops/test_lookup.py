"""Rows of tables by their ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import table_rows

TABLE = np.arange(7.0 * 3).reshape(7, 3).astype(np.float32)


@pytest.mark.parametrize("one_id", [5, -2, 7])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_row_that_is_looked_up_twice_is_the_row_with_its_gradient(one_id, shape):
    ids = jnp.full(shape, one_id)

    def value(take, table):
        return jnp.sum(jnp.nan_to_num(take(table, ids)) ** 2)

    found, expected = (take(TABLE, ids) for take in (table_rows._take_twice, table_rows._take))
    np.testing.assert_array_equal(found, expected)
    gradients = [
        jax.grad(lambda table, take=take: value(take, table))(TABLE)
        for take in (table_rows._take_twice, table_rows._take)
    ]
    np.testing.assert_array_equal(*gradients)
