"""`top_k` agrees with its plain twin, `jax.lax.top_k`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.top_k import top_k


@pytest.mark.parametrize("size, count", [(1031, 3), (1024, 4), (1409, 5), (131, 3), (7, 7)])
def test_it_agrees_with_the_plain_twin_on_equal_numbers_too(size, count, rng):
    few = rng.geometric(0.5, (2, 3, size))  # most are equal to others, and the largest are not
    masked = np.where(rng.random((2, 3, size)) < 0.5, rng.normal(size=(2, 3, size)), -np.inf)
    none = np.full((2, 3, size), -np.inf)
    for x in (few, few.astype(np.float32), masked.astype(np.float32), none.astype(np.float32)):
        values, places = jax.jit(top_k, static_argnums=1)(x, count)
        expected = jax.lax.top_k(jnp.asarray(x), count)
        assert np.array_equal(values, expected[0]) and np.array_equal(places, expected[1])


def test_a_few_of_a_vocabulary_are_found_without_sorting_all_of_it():
    text = lowered_for("cpu")
    searched = [line for line in text.splitlines() if "top_k" in line]
    assert searched and not any("32000" in line for line in searched)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_on_accelerators_it_is_one_top_k_of_a_matrix(platform):
    text = lowered_for(platform)
    assert text.count("chlo.top_k") == 1 and "tensor<6x32000xf32>" in text
    assert "sort" not in text and "gather" not in text


def lowered_for(platform):
    traced = jax.jit(top_k, static_argnums=1).trace(jnp.zeros((2, 3, 32_000)), 4)
    return traced.lower(lowering_platforms=(platform,)).as_text()
