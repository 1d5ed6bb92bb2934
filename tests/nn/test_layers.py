import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.config import (
    EmbeddingOptions,
    FeedForwardOptions,
    NormOptions,
    OutputOptions,
    TransformerConfig,
)
from jaxformer.nn.layers import Embedding, FeedForward, LMHead, Norm
from jaxformer.ops.dropout import DropoutRng

pytestmark = pytest.mark.usefixtures("optimized")

CONFIG = TransformerConfig(vocab_size=17, d_model=12, d_ff=13, num_heads=3, max_len=7)
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
    module = Embedding(17, replace(CONFIG, embeddings=EmbeddingOptions(scale=scaled)))
    assert_equal(apply(module, {"table": table}, ids), table[ids] * factor, 1e-6)


class Logits(nn.Module):
    """The output beside the embedding that it may be tied to."""

    config: TransformerConfig

    def setup(self):
        self.embedding = Embedding(17, self.config)
        self.output = LMHead(self.config)

    def __call__(self, x):
        return self.output(x, self.embedding)


@pytest.mark.parametrize("tied", ["none", "output", "inputs", "all"])
@pytest.mark.parametrize("biased", [False, True])
def test_an_output_is_a_matrix_of_its_own_or_the_embeddings_with_a_bias_if_asked(
    tied, biased, x, random_params, assert_equal, leaf_shapes
):
    module = Logits(
        replace(CONFIG, embeddings=EmbeddingOptions(tied=tied), output=OutputOptions(bias=biased))
    )
    params = random_params(module, x)
    own = tied in ("none", "inputs")
    output = params.get("output", {})
    expected = ({"kernel": (12, 17)} if own else {}) | ({"bias": (17,)} if biased else {})
    assert leaf_shapes(output) == expected
    matrix = output["kernel"] if own else params["embedding"]["table"].T
    assert_equal(apply(module, params, x), x @ matrix + output.get("bias", 0.0))


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_norm_is_its_formula(norm, use_bias, x, rng, assert_equal, leaf_shapes):
    module = Norm(replace(CONFIG, norm=norm, use_bias=use_bias, norm=NormOptions(eps=0.1)))
    params = module.init(jax.random.key(0), x)["params"]
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
    y = Norm(CONFIG).apply({"params": params}, low)
    exact = Norm(CONFIG).apply({"params": params}, low.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(y, exact.astype(jnp.bfloat16))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_the_feed_forward_network_is_its_formula(activation, gated, x, random_params, assert_equal):
    module = FeedForward(replace(CONFIG, feed_forward=FeedForwardOptions(activation, gated=gated)))
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
    module = FeedForward(replace(CONFIG, feed_forward=FeedForwardOptions(dropout_rate=0.25)))
    params = random_params(module, x)
    dropout_rng = DropoutRng.create(jax.random.key(1), np.array([4, 2]))
    hidden = np.maximum(x @ params["up"]["kernel"] + params["up"]["bias"], 0)
    hidden = hidden * np.asarray(dropout_rng.keep_mask("hidden", hidden.shape, 0.25)) / 0.75
    expected = hidden @ params["down"]["kernel"] + params["down"]["bias"]
    assert_equal(apply(module, params, x, dropout_rng), expected)
