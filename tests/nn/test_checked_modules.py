"""Modules refuse what a recipe refuses, by the same sentences, and lose no option on its way."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxformer as jf
from jaxformer.config import Linear, rotate
from jaxformer.nn.dense import Dense
from jaxformer.nn.dropout import Dropout
from jaxformer.nn.embeddings import LMHead
from jaxformer.nn.heads import TokenClassifier
from jaxformer.nn.recipe import make_stack

B, T, D, F, H = 2, 5, 8, 12, 2
PRE = jf.NormOptions(placement="pre")
RECIPE = jf.TransformerConfig(
    11, D, F, H, num_encoder_layers=1, positions=jf.Rotary(), norm=PRE, use_bias=False
)


@pytest.fixture
def x(rng):
    return rng.standard_normal((B, T, D), np.float32)


@pytest.mark.parametrize(
    ("make", "fields", "words"),
    [
        (jf.Norm, {"kind": "batch"}, ["kind='batch'", "layer, rms"]),
        (jf.Norm, {"kind": "Layer"}, ["kind='Layer'", "layer, rms"]),
        (jf.Norm, {"eps": -1.0}, ["eps=-1.0", "at least 0"]),
        (partial(jf.FeedForward, F), {"activation": "tanh"}, ["activation='tanh'", "gelu_tanh"]),
        (partial(jf.FeedForward, F), {"dropout_rate": 1.0}, ["dropout_rate=1.0", "[0, 1)"]),
        (partial(jf.MultiHeadAttention, H), {"num_kv_heads": 3}, ["num_heads=2", "num_kv_heads=3"]),
        (partial(jf.MultiHeadAttention, H), {"softcap": -1.0}, ["softcap=-1.0", "above 0"]),
        (partial(jf.MultiHeadAttention, H), {"query_scalar": -4.0}, ["query_scalar", "above 0"]),
        (partial(jf.MultiHeadAttention, H), {"norm_over_heads": True}, ["query_key_norm=False"]),
        (partial(jf.MultiHeadAttention, H), {"dropout_rate": 1.5}, ["dropout_rate=1.5", "[0, 1)"]),
        (partial(jf.MultiHeadAttention, H), {"head_dim": 0}, ["head_dim=0", "at least 1"]),
        (
            partial(jf.MultiHeadAttention, H),
            {"attention_fn": "cudnn"},
            ["'cudnn'", "ATTENTION_FNS"],
        ),
        (jf.MultiHeadAttention, {"num_heads": 0}, ["num_heads=0", "at least 1"]),
        (partial(jf.Block, H, F), {"dropout_rate": 1.5}, ["dropout_rate=1.5", "[0, 1)"]),
        (partial(jf.Block, H, F), {"norm_options": "pre"}, ["norm_options='pre'", "NormOptions"]),
        (partial(jf.Block, H, F), {"make_norm": "rms"}, ["make_norm='rms'", "a function"]),
        (partial(jf.Stack, 1, jf.Block), {"dropout_rate": 2.0}, ["dropout_rate=2.0", "[0, 1)"]),
        (partial(jf.Stack, 1, jf.Block), {"scheme": "rotary"}, ["scheme='rotary'"]),
        (
            partial(jf.Stack, 1, jf.Block),
            {"scheme": jf.Rotary(window_base=5.0)},
            ["window.size=None"],
        ),
        (partial(jf.Embedding, 5, 4), {"zero_id": 5}, ["zero_id=5", "vocab_size=5"]),
        (jf.Embedding, {"vocab_size": 0, "d_model": 4}, ["vocab_size=0", "at least 1"]),
        (partial(LMHead, 5), {"softcap": 0.0}, ["softcap=0.0", "above 0"]),
        (partial(Dropout, place="here"), {"rate": -0.1}, ["rate=-0.1", "[0, 1)"]),
        (Dense, {"features": (3, 0)}, ["features=(3, 0)", "at least 1"]),
        (partial(jf.Classifier, jf.EncoderOnly(RECIPE), 3), {"pooling": "max"}, ["token, mean"]),
        (partial(jf.Classifier, jf.EncoderOnly(RECIPE)), {"classes": 0}, ["classes=0"]),
        (partial(TokenClassifier, jf.EncoderOnly(RECIPE)), {"classes": 0}, ["classes=0"]),
        (jf.DecoderOnly, {"config": {"d_model": 8}}, ["TransformerConfig"]),
        (partial(jf.DecoderOnly, RECIPE), {"block": "own:Block"}, ["block='own:Block'"]),
    ],
)
def test_a_module_refuses_what_no_recipe_has(make, fields, words):
    with pytest.raises(jf.ConfigError) as error:
        make(**fields)
    for word in words:
        assert word in str(error.value)


def test_the_fields_of_a_users_subclass_are_his_own(x):
    class Scaled(jf.FeedForward):
        factor: float = 1.0

        def __call__(self, x, dropout_rng=None):
            return self.factor * super().__call__(x, dropout_rng)

    module = Scaled(F, factor=jnp.float32(3.0))  # an array, against its annotation
    params = module.init(jax.random.key(0), x)
    plain = jf.FeedForward(F).apply(params, x)
    np.testing.assert_allclose(module.apply(params, x), 3.0 * plain, rtol=1e-6)
    with pytest.raises(jf.ConfigError, match="activation='tanh'"):
        Scaled(F, activation="tanh")


def test_an_activation_may_be_a_function(x, random_params):
    by_function = jf.FeedForward(F, activation=jax.nn.relu)
    params = random_params(by_function, x)
    found = by_function.apply({"params": params}, x)
    np.testing.assert_array_equal(found, jf.FeedForward(F).apply({"params": params}, x))
    block = jf.Block(H, F, feed_forward_options=jf.FeedForwardOptions(jnp.tanh))
    params = random_params(block, x)
    relu = jf.Block(H, F).apply({"params": params}, x)
    assert np.abs(block.apply({"params": params}, x) - relu).max() > 1e-3


def test_an_encoder_by_its_arguments_is_the_stack_of_the_recipe(x, random_params, assert_equal):
    """Rotary positions of heads of 6 numbers, no bias, and dropout also on the input."""
    recipe = replace(RECIPE, head_dim=6, dropout_rate=0.5)
    options = {"norm_options": PRE, "head_dim": 6, "use_bias": False, "dropout_rate": 0.5}
    encoder = jf.Encoder(1, H, F, positions=jf.Rotary(), **options)
    params = random_params(encoder, x)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)}
    assert not any("bias" in path for path in paths)
    stack, key = make_stack(recipe, 1), jax.random.key(1)
    for rng in (None, key):
        expected = stack.apply({"params": params}, x, dropout_rng=rng)
        assert_equal(encoder.apply({"params": params}, x, dropout_rng=rng), expected, 1e-6)
    with pytest.raises(TypeError, match="dropout"):
        jf.Encoder(1, H, F, dropout=0.5)


def test_a_stack_has_the_heads_of_its_blocks(x, random_params, assert_equal):
    """Of a size of their own, which the recipe gives to the scheme."""
    stack = jf.Stack(
        1,
        partial(jf.Block, H, F, head_dim=6, norm_options=PRE, use_bias=False),
        scheme=jf.Rotary(),
        make_norm=partial(jf.Norm, use_bias=False),
    )
    params = random_params(stack, x)
    expected = make_stack(replace(RECIPE, head_dim=6), 1).apply({"params": params}, x)
    assert_equal(stack.apply({"params": params}, x), expected, 1e-6)


def test_positions_of_heads_need_blocks_that_tell_them(x):
    class Silent(nn.Module):
        @nn.compact
        def __call__(self, x, mask, **_):
            return nn.Dense(x.shape[-1])(x)

    def make(layer, **_):
        return jf.Block(1 + layer, F)

    with pytest.raises(jf.ConfigError, match=r"Rotary.*Silent"):
        jf.Stack(1, lambda layer: Silent(), scheme=jf.Rotary()).init(jax.random.key(0), x)
    with pytest.raises(jf.ConfigError, match=r"Alibi.*Block"):
        jf.Stack(2, make, scheme=jf.Alibi()).init(jax.random.key(0), x)
    for positions in (jf.Learned(), jf.Sinusoidal()):
        jf.Stack(1, lambda layer: Silent(), scheme=positions).init(jax.random.key(0), x)


def test_a_rotation_of_larger_heads_or_of_other_positions_is_refused(x):
    rotation = jf.Rotary(scaling=Linear(2.0)).rotation(jnp.arange(T), 4)
    with pytest.raises(jf.ConfigError, match="4 numbers"):
        rotate(jnp.ones((1, T, 1, 2)), rotation)
    with pytest.raises(jf.ConfigError, match="even head_dim"):
        jf.Encoder(1, H, F, positions=jf.Rotary(), head_dim=3).init(jax.random.key(0), x)
    attention = jf.MultiHeadAttention(H)
    with pytest.raises(jf.ConfigError, match="rotation .*kv"):
        attention.init(jax.random.key(0), x, x, rotation=rotation)


def test_a_block_gives_an_array_and_takes_a_padding_mask(x, random_params, assert_equal):
    block = jf.Block(H, F)
    two = nn.Sequential([block, jf.Block(H, F)])
    assert two.init_with_output(jax.random.key(0), x)[0].shape == x.shape
    real = np.arange(T) < np.array([[T], [3]])
    params = random_params(block, x)
    mask = jf.AttentionMask(padding_mask=real)
    expected = block.apply({"params": params}, x, mask)
    assert_equal(block.apply({"params": params}, x, real), expected)
    assert np.abs(block.apply({"params": params}, x) - expected).max() > 1e-3


class Doubled(jf.Block):
    def __call__(self, x, *args, **options):
        return 2.0 * super().__call__(x, *args, **options)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_block_that_changes_only_its_call_does_not_decode_by_another_function(scan_layers):
    recipe = replace(RECIPE, num_decoder_layers=2, scan_layers=scan_layers)
    model, tokens = jf.DecoderOnly(recipe, block=Doubled), jnp.ones((B, 3), int)
    variables = model.init(jax.random.key(0), tokens)
    assert model.apply(variables, tokens).shape == (B, 3, 11)
    cache = model.apply(variables, B, max_length=4, method="init_cache")
    with pytest.raises(jf.ConfigError, match="Doubled .*decode"):
        model.apply(variables, tokens[:, None], cache, method="decode_step")


def test_a_block_in_a_transform_of_flax_decodes_and_its_own_call_is_still_refused():
    """`nn.remat(Block)` is a class whose `__call__` is another one than that of `Block`."""
    tokens = jnp.ones((B, 3), int)

    def first_step(block):
        model = jf.DecoderOnly(replace(RECIPE, num_decoder_layers=1), block=block)
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
        cache = model.init_cache(B, max_length=4)
        step = partial(model.apply, method="decode_step")
        return jax.eval_shape(step, variables, tokens[:, None], cache)[0]

    assert first_step(nn.remat(jf.Block)).shape == (B, 1, 3, 11)
    with pytest.raises(jf.ConfigError, match="Doubled .*decode"):
        first_step(nn.remat(Doubled))
