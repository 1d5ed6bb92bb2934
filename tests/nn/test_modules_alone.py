"""Each module works without a recipe, in Linen and in NNX, as the same part does in a model."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.traverse_util import flatten_dict

import jaxformer as jf
from jaxformer.nn.dropout import Dropout
from jaxformer.nn.embeddings import LMHead
from jaxformer.nn.norm import Norm
from jaxformer.nn.recipe import make_stack
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
WINDOW = jf.WindowOptions(3)
ATTENTION = jf.MultiHeadAttention(
    H, num_kv_heads=1, query_key_norm=True, make_norm=partial(Norm, "rms", 1e-3)
)
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
    "block": (
        BLOCK,
        lambda params: params["decoder"]["blocks_0"],
        lambda model, x: model.decoder.blocks[0](x),
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
    stack = make_stack(recipe, 2)
    expected = stack.apply({"params": params}, x, AttentionMask(padding_mask=real))
    assert_equal(encoder.apply({"params": params}, x, real), expected, 1e-6)


@pytest.mark.parametrize("part", PARTS)
def test_a_module_works_inside_nnx(part, x, assert_equal):
    module = PARTS[part][0]
    inside = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)
    params = nnx.to_pure_dict(nnx.state(inside, nnx.Param))
    assert_equal(inside(x), module.apply({"params": params}, x), 1e-6)


def test_the_number_of_heads_must_divide_the_vectors_or_their_size_is_given(x):
    with pytest.raises(jf.ConfigError, match="12 .*num_heads=5"):
        jf.MultiHeadAttention(5).init(jax.random.key(0), x)
    attention = jf.MultiHeadAttention(5, head_dim=7)
    assert jax.eval_shape(attention.init_with_output, jax.random.key(0), x)[0].shape == x.shape


@pytest.mark.parametrize("scheme", [jf.Learned(), jf.Sinusoidal(), jf.Rotary(), jf.Relative()])
def test_an_encoder_on_vectors_knows_the_order_of_its_tokens_by_a_scheme(
    scheme, x, random_params, assert_equal
):
    encoder, plain = (jf.Encoder(1, H, F, positions=each) for each in (scheme, jf.NoPositions()))
    params = random_params(encoder, x)
    order = np.array([3, 0, 4, 1, 2])
    found = encoder.apply({"params": params}, x[:, order])
    assert np.abs(found - encoder.apply({"params": params}, x)[:, order]).max() > 1e-3
    alone = {name: tree for name, tree in params.items() if name != "positions"}
    assert_equal(
        *(plain.apply({"params": alone}, x)[:, order], plain.apply({"params": alone}, x[:, order])),
        1e-5,
    )
    table = params.get("positions", {}).get("table")
    if table is not None:
        assert_equal(
            encoder.apply({"params": params}, x),
            plain.apply({"params": alone}, x + table[:T]),
            1e-6,
        )


@pytest.fixture(scope="module")
def theirs():
    """Attention of Flax with parameters, which are ours too."""
    attention = nn.MultiHeadDotProductAttention(H, qkv_features=D, out_features=D)
    x, memory = np.ones((B, T, D), np.float32), np.ones((B, 7, 10), np.float32)
    return attention, jax.jit(attention.init)(jax.random.key(2), x, memory)


@pytest.mark.parametrize(
    "shape", [(B, 7), (B, 1, 7), (B, 1, 1, 7), (B, T, 7), (B, 1, T, 7)], ids=lambda s: str(len(s))
)
def test_attention_to_a_memory_of_another_width_is_that_of_flax_in_each_layout_of_its_masks(
    shape, theirs, x, rng, assert_equal
):
    attention, variables = theirs
    memory, allowed = rng.standard_normal((B, 7, 10), np.float32), rng.random(shape) < 0.6
    allowed[..., 0] = True
    of_keys = shape[1:-1] in ((), (1,), (1, 1))
    layout = allowed.reshape(B, 1, 1, 7) if of_keys else allowed.reshape(B, 1, T, 7)
    expected = attention.apply(variables, x, memory, mask=layout)
    mask = jf.AttentionMask(**{"padding_mask" if of_keys else "explicit": allowed})
    ours = jf.MultiHeadAttention(H)
    assert_equal(ours.apply(variables, x, memory, mask), expected)
    kv = ours.apply(variables, memory, head_dim=D // H, method="keys_values")
    assert_equal(ours.apply(variables, x, kv, mask), expected)


def test_a_block_with_cross_attention_needs_something_to_attend_to(x):
    block = jf.Block(H, F, cross=True)
    memory = np.ones((B, 7, 10), np.float32)
    out, _ = block.init_with_output(jax.random.key(0), x, encoder_kv=memory)
    assert out.shape == x.shape
    with pytest.raises(jf.ConfigError, match="cross=True.* encoder_kv"):
        block.init(jax.random.key(0), x)
    with pytest.raises(jf.ConfigError, match="cross=False.* encoder_kv"):
        jf.Block(H, F).init(jax.random.key(0), x, encoder_kv=memory)
    stack = make_stack(RECIPE, num_layers=1, cross=True)
    with pytest.raises(jf.ConfigError, match="cross=True.* encoder_kv"):
        stack.init(jax.random.key(0), x, AttentionMask())


DROPPING = {
    "attention": partial(jf.MultiHeadAttention, H),
    "feed-forward network": partial(jf.FeedForward, F),
    "block": partial(jf.Block, H, F),
    "encoder": partial(jf.Encoder, 1, H, F),
    "model": lambda dropout_rate: jf.DecoderOnly(replace(RECIPE, dropout_rate=dropout_rate)),
}


@pytest.mark.parametrize("make", DROPPING.values(), ids=DROPPING)
def test_dropout_takes_a_key_which_numbers_the_rows_and_is_never_ignored(make, x):
    module, silent = make(dropout_rate=0.5), make(dropout_rate=0.0)
    params, key = module.init(jax.random.key(0), x), jax.random.key(1)
    plain, dropped, numbered, legacy = (
        module.apply(params, x, dropout_rng=rng)
        for rng in (
            None,
            key,
            jf.DropoutRng(key, jnp.arange(B)),
            jax.random.PRNGKey(1),
        )
    )
    assert np.abs(plain - dropped).max() > 1e-3
    np.testing.assert_array_equal(dropped, numbered)
    np.testing.assert_array_equal(dropped, legacy)
    streamed = module.apply(params, x, rngs={"dropout": key})
    assert np.abs(plain - streamed).max() > 1e-3
    with pytest.raises(TypeError, match="dropout_rng"):
        module.apply(params, x, dropout_rng=3)
    # A model may have dropout of Flax besides.
    np.testing.assert_array_equal(silent.apply(params, x, rngs={"dropout": key}), plain)


def test_an_untyped_key_of_another_generator_drops_as_its_typed_one_does(x):
    drop = partial(Dropout(0.5, "input").apply, {}, x)
    with jax.default_prng_impl("rbg"):  # its untyped keys have four words
        key, legacy = jax.random.key(7), jax.random.PRNGKey(7)
        np.testing.assert_array_equal(drop(legacy), drop(key))


@pytest.mark.parametrize("count", [1, B + 1])
def test_dropout_of_another_number_of_ids_than_rows_is_refused(count, x):
    """One id for all rows would be broadcast: each row would lose the same numbers."""
    rng = jf.DropoutRng(jax.random.key(0), np.arange(count))
    with pytest.raises(ValueError, match="example_ids"):
        Dropout(0.5, "input").apply({}, x, rng)


@pytest.mark.parametrize(
    "positions", [jf.Sinusoidal(), jf.Learned()], ids=["sinusoidal", "learned"]
)
def test_positions_of_the_callers_own_are_any_of_the_recipes_and_no_others(
    positions, random_params, assert_equal
):
    recipe = jf.TransformerConfig(V, D, F, H, num_decoder_layers=1, positions=positions, max_len=23)
    model, tokens = jf.DecoderOnly(recipe), np.arange(B * T).reshape(B, T) % V
    params = random_params(model, tokens)
    # After 17 tokens of another document, of which nothing is seen.
    before = np.full((B, 17), 3)
    packed = np.concatenate([before, tokens], 1), np.repeat([[1] * 17 + [2] * T], B, 0)
    expected = model.apply({"params": params}, *packed)[:, 17:]
    places = np.repeat(np.arange(17, 17 + T)[None], B, 0)
    assert_equal(model.apply({"params": params}, tokens, positions=places), expected)
    for beyond in (places + 2, places - 18):
        with pytest.raises(ValueError, match=" 0 to 22"):
            model.apply({"params": params}, tokens, positions=beyond)
    traced = jax.jit(lambda at: model.apply({"params": params}, tokens, positions=at))
    assert np.isnan(traced(places + 2)[:, -1]).all() and np.isfinite(traced(places)).all()


def test_an_array_with_another_number_of_axes_is_refused_and_no_examples_are_none(
    x, params, misuse
):
    model = jf.DecoderOnly(RECIPE)
    for module in (ATTENTION, BLOCK, jf.Encoder(1, H, F)):
        with pytest.raises(ValueError, match=r"x .*\(5, 12\)"):
            module.init(jax.random.key(0), x[0])
    with pytest.raises(ValueError, match=r"x .*\(5, 12\)"):
        model.apply({"params": params}, np.ones(T, int))
    assert model.apply({"params": params}, np.ones((0, T), int)).shape == (0, T, V)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scan_layers", [False, True])
def test_flax_tabulates_the_operations_of_each_family(scan_layers):
    tokens = np.ones((B, T), int)
    short = replace(RECIPE, num_decoder_layers=1, num_encoder_layers=1)
    for family, inputs in (
        (jf.DecoderOnly, (tokens,)),
        (jf.EncoderOnly, (tokens,)),
        (jf.MaskedLanguageModel, (tokens,)),
        (jf.EncoderDecoder, (tokens, tokens)),
    ):
        model = family(replace(short, scan_layers=scan_layers))
        options = {"compute_flops": True, "console_kwargs": {"width": 250}}
        table = nn.tabulate(model, jax.random.key(0), **options)(*inputs)
        assert "MultiHeadAttention" in table and "Total" in table


def test_the_repr_of_a_recipe_is_code():
    for recipe in (RECIPE, jf.LLAMA3_8B, replace(RECIPE, positions=jf.Rotary(scaling=jf.Yarn()))):
        assert eval(repr(recipe), vars(jf.config)) == recipe


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (jf.EncoderOnly(replace(RECIPE, window=WINDOW)), "ids", "window.size=3"),
        (jf.DecoderOnly(replace(RECIPE, pooler="tanh")), "ids", "pooler='tanh' and .*num_types=0"),
        (
            jf.DecoderOnly(replace(RECIPE, embeddings=jf.EmbeddingOptions(num_types=2))),
            "ids",
            "pooler='none' and embeddings.num_types=2 are of an encoder alone",
        ),
    ],
)
def test_an_option_without_effect_is_refused(module, inputs, message, x):
    with pytest.raises(jf.ConfigError, match=message):
        module.init(jax.random.key(0), x if inputs == "x" else np.ones((B, T), int))


class Difference(nn.Module):
    """An attention of a user: the difference of two."""

    fields: Any

    @nn.compact
    def __call__(self, x, kv=None, mask=None, **inputs):
        first, second = (jf.MultiHeadAttention(**self.fields, name=name) for name in ("a", "b"))
        return first(x, kv, mask, **inputs) - 0.5 * second(x, kv, mask, **inputs)


class Shift(nn.Module):
    """A norm of a user, which adds a number to each feature."""

    @nn.compact
    def __call__(self, x):
        by = self.param("by", nn.initializers.zeros, x.shape[-1:])
        return x + by.reshape((1,) * (x.ndim - 1) + by.shape)


class Ones(nn.Module):
    """A feed-forward network of a user, which gives ones."""

    def __call__(self, x, dropout_rng=None):
        return jnp.ones_like(x)


def test_a_block_takes_functions_that_make_its_parts(x, random_params, assert_equal):
    block = jf.Block(
        H,
        F,
        norm_options=jf.NormOptions(placement="pre"),
        make_attention=lambda **fields: Difference(fields),
        make_feed_forward=lambda **fields: Ones(),
        make_norm=lambda **fields: Shift(),
    )
    params = random_params(block, x, CAUSAL)
    assert sorted(params) == ["attention", "attention_norm", "feed_forward_norm"]
    assert sorted(params["attention"]) == ["a", "b"]
    out = block.apply({"params": params}, x, CAUSAL)
    h = x + params["attention_norm"]["by"]
    one, two = (
        jf.MultiHeadAttention(H).apply({"params": params["attention"][name]}, h, mask=CAUSAL)
        for name in ("a", "b")
    )
    assert_equal(out, x + one - 0.5 * two + 1.0, 1e-6)


def test_an_attention_without_the_methods_of_a_cache_is_refused_by_its_name():
    block = partial(jf.Block, make_attention=lambda **fields: Difference(fields))
    model = jf.DecoderOnly(RECIPE, block=block)
    with pytest.raises(jf.ConfigError, match="Difference.*init_cache and decode"):
        model.init_cache(B, max_length=T)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_norm_of_ones_own_is_every_norm_of_a_stack(placement, scan_layers):
    recipe = replace(
        RECIPE,
        norm=jf.NormOptions("rms", placement, 1e-3),
        scan_layers=scan_layers,
        embeddings=jf.EmbeddingOptions(norm=True),
    )
    made = []

    def make_norm(**options):
        made.append(options)
        return Shift()

    model = jf.DecoderOnly(recipe, block=partial(jf.Block, make_norm=make_norm))
    params = jax.eval_shape(model.init, jax.random.key(0), np.ones((B, T), int))["params"]
    norms = {path[-2]: path[-1] for path in flatten_dict(params) if path[-2].endswith("norm")}
    expected = {"embedding_norm", "attention_norm", "feed_forward_norm"}
    expected |= {"final_norm"} if placement == "pre" else set()
    assert expected <= norms.keys() and {norms[name] for name in expected} == {"by"}
    assert made and all(x == {"kind": "rms", "eps": 1e-3, "use_bias": True} for x in made)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_block_knows_the_number_of_its_layer_where_it_has_one(scan_layers):
    seen = []

    def block(**fields):
        seen.append(fields["layer"])
        return jf.Block(**fields)

    recipe = replace(RECIPE, num_decoder_layers=3, scan_layers=scan_layers)
    model = jf.DecoderOnly(recipe, block=block)
    jax.eval_shape(model.init, jax.random.key(0), np.ones((B, T), int))
    assert set(seen) == ({None} if scan_layers else {0, 1, 2})
