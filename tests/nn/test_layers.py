from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.nn.dense import Dense
from jaxformer.nn.norm import Norm
from jaxformer.ops.activations import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("optimized")

TWINS = {
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}


@pytest.fixture
def x(rng):
    return rng.standard_normal((2, 5, 12), np.float32) + 3.0


def apply(module, params, *inputs):
    return jax.jit(lambda params: module.apply({"params": params}, *inputs))(params)


@partial(jax.jit, static_argnums=0)
def derivatives(function, x, direction, along):
    """The function forwards, its gradient, and the second derivative."""

    def total(x):
        return jnp.sum(function(x) * direction)

    def along_the_slope(x):
        return jnp.sum(jax.grad(total)(x) * along)

    forward = jax.jvp(function, (x,), (along,))
    return forward, jax.grad(total)(x), jax.grad(along_the_slope)(x)


@pytest.mark.parametrize(("platform", "rows"), [("cpu", 2), ("cuda", 2), ("cuda", 1)])
@pytest.mark.parametrize(("kind", "use_bias"), [("layer", True), ("layer", False), ("rms", True)])
def test_a_norm_and_its_derivatives_are_those_of_the_formula(
    kind, use_bias, platform, rows, rng, assert_equal, choose_platform, leaf_shapes
):
    choose_platform(platform)
    module, arrays = Norm(kind, 0.1, use_bias), rng.standard_normal((3, rows, 7), np.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), arrays[0])["params"]
    has_bias = kind == "layer" and use_bias
    assert leaf_shapes(params) == {"scale": (7,)} | ({"bias": (7,)} if has_bias else {})
    params = {name: rng.standard_normal(7, np.float32) for name in params}

    def twin(x):
        x = x - jnp.mean(x, axis=-1, keepdims=True) if kind == "layer" else x
        x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1) * params["scale"][None]
        return x + params["bias"][None] if has_bias else x

    given = derivatives(partial(module.apply, {"params": params}), *arrays)
    for a, b in zip(*map(jax.tree.leaves, (given, derivatives(twin, *arrays))), strict=True):
        assert np.abs(b).max() > 0.01
        assert_equal(a, b)


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


def test_a_norm_computes_in_float32_and_returns_the_type_it_was_given(x):
    low = jnp.asarray(x, jnp.bfloat16)
    params = {"scale": np.ones(12, np.float32), "bias": np.zeros(12, np.float32)}
    y = Norm().apply({"params": params}, low)
    exact = Norm().apply({"params": params}, low.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(y, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("features", "axis", "bias"),
    [(7, -1, False), ((3, 7), -1, True), ((7,), (-2, -1), False), (7, (-2, -1), True)],
)
def test_a_dense_layer_has_the_parameters_and_the_output_of_flax(
    features, axis, bias, x, random_params, assert_equal
):
    ours = Dense(features, 2 if axis == (-2, -1) else 1, bias)
    flax = nn.DenseGeneral(features, axis=axis, use_bias=bias)
    x = x.reshape(2, 5, 3, 4)
    params = random_params(ours, x)

    @jax.jit
    def both(params, x):
        return [
            (layer.init(jax.random.key(0), x), layer.apply({"params": params}, x))
            for layer in (ours, flax)
        ]

    (first, out), (second, expected) = both(params, x)
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))
    assert_equal(out, expected)
