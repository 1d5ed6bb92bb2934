"""Activations and norms against their formulas, as every platform computes them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.ops.elementwise import ACTIVATIONS, norm, normalize

pytestmark = pytest.mark.usefixtures("optimized")


def plain(x, eps, centered):
    if centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


@partial(jax.jit, static_argnums=0)
def derivatives(function, x, direction, along):
    """The function forwards, its gradient, and the second derivative."""

    def total(x):
        return jnp.sum(function(x) * direction)

    def along_the_slope(x):
        return jnp.sum(jax.grad(total)(x) * along)

    forward = jax.jvp(function, (x,), (along,))
    return forward, jax.grad(total)(x), jax.grad(along_the_slope)(x)


def assert_same_derivatives(function, twin, rng, assert_equal):
    arrays = rng.standard_normal((3, 2, 7), np.float32)
    given, expected = derivatives(function, *arrays), derivatives(twin, *arrays)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert np.abs(b).max() > 0.01
        assert_equal(a, b)


@pytest.mark.parametrize("centered", [True, False])
def test_normalize_and_its_derivatives_are_those_of_the_formula(centered, rng, assert_equal):
    twin = partial(plain, eps=0.1, centered=centered)
    assert_same_derivatives(lambda x: normalize(x, 0.1, centered), twin, rng, assert_equal)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_norm_and_its_derivatives_are_those_of_the_formula(
    has_bias, platform, rng, assert_equal, choose_platform
):
    choose_platform(platform)
    scale, shift = rng.standard_normal((2, 7), np.float32)
    bias = shift if has_bias else None

    def twin(x):
        return plain(x, 0.1, True) * scale[None] + (shift[None] if has_bias else 0)

    assert_same_derivatives(lambda x: norm(x, scale, bias, 0.1, True), twin, rng, assert_equal)


TWINS = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_and_its_derivative_are_those_of_jax(
    name, platform, rng, assert_equal, choose_platform
):
    choose_platform(platform)
    x = 3.0 * rng.standard_normal((3, 7, 11), np.float32)

    def of(function, x):
        return function(x), jax.grad(lambda x: (function(x) * x).sum())(x)

    ours, theirs = jax.jit(lambda x: (of(ACTIVATIONS[name], x), of(TWINS[name], x)))(x)
    assert_equal(ours[0], theirs[0], 1e-6)
    assert_equal(ours[1], theirs[1])
