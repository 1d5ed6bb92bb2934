from functools import partial

import jax
import numpy as np
import pytest

from jaxformer.nn.layers import ACTIVATIONS

TWINS = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_and_its_derivative_are_those_of_jax(name, rng, assert_equal):
    x = 3.0 * rng.standard_normal((3, 7, 11), np.float32)

    def both(function):
        return jax.jit(jax.value_and_grad(lambda x: (function(x) * x).sum()))(x)

    given, expected = both(ACTIVATIONS[name]), both(TWINS[name])
    assert_equal(given[0], expected[0])
    assert_equal(given[1], expected[1])
    assert_equal(ACTIVATIONS[name](x), TWINS[name](x), 1e-6)
