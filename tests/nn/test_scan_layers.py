"""`scan_layers`: one loop over stacked blocks is the same function as a list of blocks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxformer as jf
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.remat import REMAT
from tests.configs import small

B, T, V = 2, 5, 17
LISTED = small(
    d_ff=14,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dropout_rate=0.2,
    attention=jf.AttentionOptions(dropout_rate=0.1),
    window=jf.WindowOptions(2, full_every=2),
    feed_forward__dropout_rate=0.1,
    positions=jf.Relative(),
)
SCANNED = replace(LISTED, scan_layers=True)
TOKENS = np.arange(B * T).reshape(B, T) % V
INPUTS = {jf.EncoderDecoder: (TOKENS, TOKENS[:, :4]), jf.DecoderOnly: (TOKENS,)}
INPUTS |= {jf.MaskedLanguageModel: (TOKENS,)}
GPT = replace(
    LISTED,
    d_ff=15,
    num_encoder_layers=0,
    norm=jf.NormOptions(placement="pre"),
    window=jf.WindowOptions(),
    feed_forward=jf.FeedForwardOptions("gelu_tanh"),
    embeddings=jf.EmbeddingOptions(tied="output", scale=False),
    positions=jf.Learned(),
)


class OwnBlock(jf.Block):
    """A block with a parameter of its own."""

    def setup(self):
        super().setup()
        self.gain = self.param("gain", nn.initializers.ones, (1, 1, 1))

    def after_attention(self, *inputs):
        return super().after_attention(*inputs) * self.gain


class Numbered(OwnBlock):
    """A block that uses the number of its layer."""

    def after_attention(self, *inputs):
        return super().after_attention(*inputs) * (2.0 + jnp.cos(jnp.float32(self.layer)))


def rematerialised(**fields):
    return nn.remat(Numbered, methods=["__call__", "decode"])(**fields)


def total(model, params, *inputs):
    """A number that depends on all outputs, with dropout."""
    dropout_rng = jf.DropoutRng(jax.random.key(3), jnp.array([4, 9]))
    found = model.apply({"params": params}, *inputs, dropout_rng=dropout_rng)
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(found))


def assert_close(given, expected):
    """The difference of two trees is at most a millionth of their size."""
    given, expected = jax.tree.map(np.asarray, (given, expected))
    difference = jax.tree.map(np.subtract, given, expected)
    squares = [sum((x**2).sum() for x in jax.tree.leaves(tree)) for tree in (difference, expected)]
    assert squares[0] <= 1e-12 * squares[1]


@pytest.mark.parametrize(
    ("kind", "block", "window"),
    [
        pytest.param(jf.EncoderDecoder, REMAT["blocks"], None, marks=pytest.mark.long),
        (jf.DecoderOnly, OwnBlock, 2),
        (jf.DecoderOnly, Numbered, 2),
        pytest.param(jf.EncoderDecoder, Numbered, None, marks=pytest.mark.long),
        pytest.param(jf.DecoderOnly, rematerialised, 2, marks=pytest.mark.long),
        pytest.param(jf.MaskedLanguageModel, jf.Block, None, marks=pytest.mark.long),
        pytest.param(jf.DecoderOnly, jf.Block, None, marks=pytest.mark.long),
        pytest.param(jf.DecoderOnly, REMAT["matmuls"], None, marks=pytest.mark.long),
    ],
)
def test_value_and_gradient_are_those_of_a_list_of_blocks_with_dropout_and_some_windows(
    kind, block, window, random_params
):
    options = jf.WindowOptions(window, full_every=window)
    configs = (replace(config, window=options) for config in (LISTED, SCANNED))
    models = [kind(config, block=block) for config in configs]
    params = random_params(models[0], *INPUTS[kind])

    @jax.jit
    def both(params):
        def value(model, params):
            return jax.value_and_grad(lambda p: total(model, p, *INPUTS[kind]))(params)

        listed, scanned = models
        return value(listed, params), value(scanned, jf.stack_blocks(params))

    (value, gradient), (scanned_value, scanned_gradient) = both(params)
    assert_close(scanned_value, value)
    assert_close(scanned_gradient, jf.stack_blocks(jax.tree.map(np.asarray, gradient)))


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_block_that_uses_its_number_decodes_as_it_trains(
    scan_layers, random_params, assert_equal
):
    config = replace(LISTED, scan_layers=scan_layers, dropout_rate=0.0)
    model = jf.EncoderDecoder(config, block=Numbered)
    source, target = INPUTS[jf.EncoderDecoder]
    params = random_params(model, source, target)

    @jax.jit
    def both(params):
        variables = {"params": params}
        cache = model.apply(variables, source, max_length=5, method="init_cache")
        logits, _ = model.apply(variables, target[:, None], cache, method="decode_step")
        return model.apply(variables, source, target), logits[:, 0]

    whole, decoded = both(params)
    assert_equal(decoded, whole, 1e-5)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_an_empty_cache_without_the_parameters_that_a_block_makes_says_what_to_give(scan_layers):
    model = jf.DecoderOnly(replace(GPT, scan_layers=scan_layers), block=Numbered)
    with pytest.raises(jf.ConfigError, match="bind.*params"):
        model.init_cache(3, max_length=5)


def test_layers_do_not_start_equal():
    @jax.jit  # compiles the initializer of one matrix alone
    def kernel():
        params = jf.DecoderOnly(SCANNED).init(jax.random.key(0), TOKENS)["params"]
        return params["decoder"]["stacked_blocks"]["feed_forward"]["up"]["kernel"]

    first, second = np.asarray(kernel())
    assert np.std(first) > 0.1 and np.abs(first - second).max() > 0.1


@pytest.mark.parametrize(
    "name",
    ["muon", pytest.param("adam", marks=pytest.mark.long)],
)
def test_an_optimizer_makes_the_same_updates(name, random_params):
    params = random_params(jf.DecoderOnly(GPT), TOKENS)
    config = jf.OptimizerConfig(
        name=name, schedule="constant", warmup_steps=1, weight_decay=0.1, grad_clip_norm=1.0
    )

    def updated(params, model):
        optimizer = jf.make_optimizer(config, axes=parameter_axes(model))
        gradients = jax.tree.map(jnp.sin, params)
        return optimizer.update(gradients, optimizer.init(params), params)[0]

    updated = jax.jit(updated, static_argnums=1)
    stacked = updated(jf.stack_blocks(params), jf.DecoderOnly(replace(GPT, scan_layers=True)))
    listed = jax.tree.map(np.asarray, updated(params, jf.DecoderOnly(GPT)))
    assert_close(stacked, jf.stack_blocks(listed))


class Counting(jf.Block):
    """A block that sows a number for the loss."""

    def __call__(self, x, *args, **options):
        self.sow("losses", "mean", x.mean(axis=(1, 2)))
        return super().__call__(x, *args, **options)


def test_what_a_block_sows_is_kept_with_an_axis_of_layers(rng, random_params, assert_equal):
    tokens = rng.integers(0, 17, (2, 5))
    sizes = {"d_model": 12, "d_ff": 13, "num_heads": 3, "num_decoder_layers": 3}
    scanned = jf.DecoderOnly(jf.TransformerConfig(17, **sizes, scan_layers=True), block=Counting)
    listed = scanned.clone(config=replace(scanned.config, scan_layers=False))
    params = random_params(scanned, tokens)

    def total(params, model):
        _, sown = model.apply({"params": params}, tokens, mutable=["losses"])
        return sum(map(jnp.sum, jax.tree.leaves(sown["losses"]))), sown["losses"]

    (value, sown), slope = jax.value_and_grad(total, has_aux=True)(params, scanned)
    (expected, _), slopes = jax.value_and_grad(total, has_aux=True)(
        jf.unstack_blocks(params), listed
    )
    assert_equal(value, expected)
    assert sown["decoder"]["stacked_blocks"]["mean"][0].shape == (3, 2)
    jax.tree.map(assert_equal, jf.unstack_blocks(slope), slopes)


def test_a_folder_of_transformers_holds_the_same_model(tmp_path, random_params):
    params = random_params(jf.DecoderOnly(GPT), TOKENS)
    model = jf.DecoderOnly(replace(GPT, scan_layers=True))
    jf.save_pretrained(tmp_path / "gpt2", model, jf.stack_blocks(params))
    found = jf.load_pretrained(tmp_path / "gpt2")
    jax.tree.map(np.testing.assert_array_equal, found.params, params)


@pytest.mark.long
def test_stacked_blocks_are_applied_and_decode_without_compilation(random_params):
    """Under `jax.disable_jit`, as for debugging, the numbers of layers are not traced."""
    sizes = {"d_model": 6, "d_ff": 5, "num_heads": 2, "num_decoder_layers": 2}
    model = jf.DecoderOnly(jf.TransformerConfig(V, **sizes, scan_layers=True), block=Numbered)
    params = {"params": random_params(model, TOKENS)}
    expected = model.apply(params, TOKENS)
    with jax.disable_jit():
        cache = model.apply(params, B, max_length=T, method="init_cache")
        decoded, _ = model.apply(params, TOKENS[:, None], cache, method="decode_step")
        whole = model.apply(params, TOKENS)
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    np.testing.assert_allclose(decoded[:, 0], expected, atol=1e-5)
