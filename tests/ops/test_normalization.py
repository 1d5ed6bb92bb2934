from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.nn.layers import normalize

pytestmark = pytest.mark.usefixtures("optimized")


def plain(x, eps, centered):
    if centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


@pytest.mark.parametrize("centered", [True, False])
def test_normalize_and_its_derivatives_are_those_of_the_formula(centered, rng, assert_equal):
    x, direction, along = rng.standard_normal((3, 2, 7), np.float32)

    @partial(jax.jit, static_argnums=0)
    def derivatives(function):
        def total(x):
            return jnp.sum(function(x, 0.1, centered) * direction)

        def along_the_slope(x):
            return jnp.sum(jax.grad(total)(x) * along)

        forward = jax.jvp(lambda x: function(x, 0.1, centered), (x,), (along,))
        return forward, jax.grad(total)(x), jax.grad(along_the_slope)(x)

    given, expected = derivatives(normalize), derivatives(plain)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert np.abs(b).max() > 0.01
        assert_equal(a, b)
