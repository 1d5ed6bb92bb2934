import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.nn.layers import Dense, Embedding, FeedForward, LMHead, Norm
from jaxformer.ops.dropout import DropoutRng

pytestmark = pytest.mark.usefixtures("optimized")

ERF = np.vectorize(math.erf)

ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + ERF(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.fixture
def x(rng):
    return rng.standard_normal((2, 5, 12), np.float32) + 3.0


def apply(module, params, *inputs):
    return jax.jit(lambda params: module.apply({"params": params}, *inputs))(params)


@pytest.mark.parametrize(("scaled", "factor"), [(True, math.sqrt(12)), (False, 1.0)])
def test_an_embedding_is_a_row_times_the_root_of_d(scaled, factor, rng, assert_equal):
    table = rng.standard_normal((17, 12), np.float32)
    ids = np.array([[3, 0, 16], [3, 3, 1]])
    module = Embedding(17, 12, scale=scaled)
    assert_equal(apply(module, {"table": table}, ids), table[ids] * factor, 1e-6)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_an_output_is_a_matrix_of_its_own_or_the_embeddings_with_a_bias_if_asked(
    tied, biased, x, random_params, assert_equal, leaf_shapes
):
    class Logits(nn.Module):
        @nn.compact
        def __call__(self, x):
            embedding = Embedding(17, 12, name="embedding")
            return LMHead(17, biased, name="output")(x, embedding if tied else None)

    params = random_params(Logits(), x)
    output = params.get("output", {})
    expected = ({} if tied else {"kernel": (12, 17)}) | ({"bias": (17,)} if biased else {})
    assert leaf_shapes(output) == expected
    matrix = params["embedding"]["table"].T if tied else output["kernel"]
    assert_equal(apply(Logits(), params, x), x @ matrix + output.get("bias", 0.0))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_norm_is_its_formula(norm, use_bias, x, rng, assert_equal, leaf_shapes):
    module = Norm(norm, 0.1, use_bias)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    biased = norm == "layer" and use_bias
    assert leaf_shapes(params) == {"scale": (12,)} | ({"bias": (12,)} if biased else {})
    params = {name: rng.standard_normal(12, np.float32) for name in params}
    wide = np.float64(x)
    if norm == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 0.1) * params["scale"]
    assert_equal(apply(module, params, x), expected + params.get("bias", 0.0))


def test_a_norm_computes_in_float32_and_returns_the_type_it_was_given(x):
    low = jnp.asarray(x, jnp.bfloat16)
    params = {"scale": np.ones(12, np.float32), "bias": np.zeros(12, np.float32)}
    y = Norm().apply({"params": params}, low)
    exact = Norm().apply({"params": params}, low.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(y, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("activation", "gated"), [*((name, False) for name in ACTIVATIONS), ("silu", True)]
)
def test_the_feed_forward_network_is_its_formula(activation, gated, x, random_params, assert_equal):
    module = FeedForward(13, activation, gated)
    params = random_params(module, x)
    dense = {
        name: np.float64(x) @ leaf["kernel"] + leaf["bias"]
        for name, leaf in params.items()
        if name != "down"
    }
    hidden = ACTIVATIONS[activation](dense["gate" if gated else "up"])
    hidden = hidden * dense["up"] if gated else hidden
    expected = hidden @ params["down"]["kernel"] + params["down"]["bias"]
    assert_equal(apply(module, params, x), expected)


def test_activation_dropout_acts_between_the_two_maps(x, random_params, assert_equal):
    module = FeedForward(13, dropout_rate=0.25)
    params = random_params(module, x)
    dropout_rng = DropoutRng.create(jax.random.key(1), np.array([4, 2]))
    hidden = np.maximum(x @ params["up"]["kernel"] + params["up"]["bias"], 0)
    kept = jax.jit(lambda: dropout_rng.keep_mask("hidden", hidden.shape, 0.25))()
    hidden = hidden * np.asarray(kept) / 0.75
    expected = hidden @ params["down"]["kernel"] + params["down"]["bias"]
    assert_equal(apply(module, params, x, dropout_rng), expected)


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
