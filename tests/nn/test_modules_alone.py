"""Each module works without a recipe, in Linen and in NNX, as the same part does in a model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxformer as jf
from jaxformer.nn import LMHead, Positions
from jaxformer.ops.masks import AttentionMask

B, T, D, F, H, V = 2, 5, 12, 13, 3, 17
RECIPE = jf.TransformerConfig(
    V,
    D,
    F,
    H,
    num_decoder_layers=2,
    num_encoder_layers=2,
    norm=jf.NormOptions("rms", "pre", 1e-3),
    attention=jf.AttentionOptions(num_kv_heads=1, query_key_norm=True),
    feed_forward=jf.FeedForwardOptions("silu", gated=True),
    embeddings=jf.EmbeddingOptions(tied="none"),
)
CAUSAL = AttentionMask(causal=True)
ATTENTION = jf.MultiHeadAttention(H, num_kv_heads=1, query_key_norm=RECIPE.norm)
BLOCK = jf.Block(
    H,
    F,
    norm_options=RECIPE.norm,
    attention_options=RECIPE.attention,
    feed_forward_options=RECIPE.feed_forward,
)


@pytest.fixture
def x(rng):
    return rng.standard_normal((B, T, D), np.float32)


@pytest.fixture(scope="module")
def params(random_params):
    return random_params(jf.DecoderOnly(RECIPE), np.ones((B, T), int))


def in_model(params, x, method):
    """The result of `method`, a function of the bound decoder-only model and `x`."""
    return method(jf.DecoderOnly(RECIPE).bind({"params": params}), x)


PARTS = {
    "attention": (
        ATTENTION,
        lambda params: params["decoder"]["blocks_1"]["attention"],
        lambda model, x: model.decoder.blocks[1].attention(x),
    ),
    "feed-forward network": (
        jf.FeedForward(F, "silu", gated=True),
        lambda params: params["decoder"]["blocks_1"]["feed_forward"],
        lambda model, x: model.decoder.blocks[1].feed_forward(x),
    ),
    "norm": (
        jf.Norm("rms", 1e-3),
        lambda params: params["decoder"]["final_norm"],
        lambda model, x: model.decoder.final_norm(x),
    ),
    "output": (
        LMHead(V),
        lambda params: params["output"],
        lambda model, x: model.output(x),
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_module_alone_is_the_same_part_of_a_model(part, x, params, assert_equal):
    module, subtree, method = PARTS[part]
    expected = in_model(params, x, method)
    initial = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(np.shape, initial) == jax.tree.map(np.shape, subtree(params))
    assert_equal(module.apply({"params": subtree(params)}, x), expected, 1e-6)


def test_a_block_alone_is_the_same_block_of_a_model(x, params, assert_equal):
    expected, _ = in_model(params, x, lambda model, x: model.decoder.blocks[0](x, CAUSAL))
    alone, _ = BLOCK.apply({"params": params["decoder"]["blocks_0"]}, x, CAUSAL)
    assert_equal(alone, expected, 1e-6)


def test_an_embedding_alone_is_that_of_a_model(params, assert_equal):
    ids = np.array([[3, 0, 16], [3, 3, 1]])
    expected = in_model(params, ids, lambda model, ids: model.embedding(ids))
    alone = jf.Embedding(V, D).apply({"params": params["embedding"]}, ids)
    assert_equal(alone, expected, 1e-6)


def test_an_encoder_on_vectors_is_the_stack_of_a_model_without_positions(
    x, random_params, assert_equal
):
    recipe = replace(RECIPE, positions=jf.NoPositions())
    encoder = jf.Encoder(
        2,
        H,
        F,
        norm_options=recipe.norm,
        attention_options=recipe.attention,
        feed_forward_options=recipe.feed_forward,
    )
    real = np.arange(T) < np.array([[5], [3]])
    params = random_params(encoder, x, real)
    stack = jf.Stack(recipe, 2)
    expected, _ = stack.apply({"params": params}, x, AttentionMask(padding_mask=real))
    assert_equal(encoder.apply({"params": params}, x, real), expected, 1e-6)


@pytest.mark.parametrize("part", PARTS)
def test_a_module_works_inside_nnx(part, x, assert_equal):
    module = PARTS[part][0]
    inside = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)
    params = nnx.to_pure_dict(nnx.state(inside, nnx.Param))
    assert_equal(inside(x), module.apply({"params": params}, x), 1e-6)


def test_the_number_of_heads_must_divide_the_vectors_or_their_size_is_given(x):
    with pytest.raises(jf.ConfigError, match="12 numbers are not divisible by num_heads=5"):
        jf.MultiHeadAttention(5).init(jax.random.key(0), x)
    attention = jf.MultiHeadAttention(5, head_dim=7)
    assert jax.eval_shape(attention.init_with_output, jax.random.key(0), x)[0].shape == x.shape


def test_positions_alone_take_the_size_of_the_vectors(x, assert_equal):
    table = Positions(jf.Learned(), head_dim=4, max_len=7)
    at = jf.Places(jnp.arange(T), jnp.arange(T), T, H)
    (y, rotation, bias), variables = table.init_with_output(jax.random.key(0), x, at)
    assert variables["params"]["table"].shape == (7, D) and rotation is None and bias is None
    assert_equal(y, x + variables["params"]["table"][None, :T], 1e-6)
