"""The largest numbers of long rows, against JAX's own search of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.decoding.largest import largest


@pytest.mark.parametrize("size, count", [(1031, 3), (1024, 4), (1409, 5), (131, 3), (7, 7)])
def test_the_largest_are_those_of_top_k_and_of_equals_the_first(size, count, rng):
    few = rng.geometric(0.5, (2, 3, size))  # most are equal to others, and the largest are not
    masked = np.where(rng.random((2, 3, size)) < 0.5, rng.normal(size=(2, 3, size)), -np.inf)
    none = np.full((2, 3, size), -np.inf)
    for x in (few, few.astype(np.float32), masked.astype(np.float32), none.astype(np.float32)):
        values, places = jax.jit(largest, static_argnums=1)(x, count)
        expected = jax.lax.top_k(jnp.asarray(x), count)
        assert np.array_equal(values, expected[0]) and np.array_equal(places, expected[1])


def test_a_few_of_a_vocabulary_are_found_without_ranking_all_of_it():
    text = jax.jit(largest, static_argnums=1).lower(jnp.zeros((2, 32_000)), 4).as_text()
    searched = [line for line in text.splitlines() if "top_k" in line]
    assert searched and not any("2x32000" in line for line in searched)
