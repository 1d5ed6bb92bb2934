"""`scan_layers`: one loop over stacked blocks is the same function as a list of blocks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jaxformer import (
    Block,
    DecoderOnly,
    DropoutRng,
    EncoderDecoder,
    MaskedLanguageModel,
    OptimizerConfig,
    SearchConfig,
    TransformerConfig,
    beam_search,
    load_pretrained,
    make_optimizer,
    make_step_fn,
    save_pretrained,
    stack_blocks,
    unstack_blocks,
)
from jaxformer.config import (
    AttentionOptions,
    EmbeddingOptions,
    FeedForwardOptions,
    Learned,
    NormOptions,
    Relative,
)
from jaxformer.nn.axes import parameter_axes
from jaxformer.nn.blocks import REMAT
from jaxformer.nn.int8 import Int8, quantize

B, T, V = 2, 5, 17
LISTED = TransformerConfig(
    vocab_size=V,
    d_model=12,
    d_ff=14,
    num_heads=3,
    num_encoder_layers=2,
    num_decoder_layers=3,
    max_len=11,
    attention=AttentionOptions(dropout_rate=0.1),
    feed_forward=FeedForwardOptions(dropout_rate=0.1),
    positions=Relative(),
    dropout_rate=0.2,
)
SCANNED = replace(LISTED, scan_layers=True)
TOKENS = np.arange(B * T).reshape(B, T) % V
INPUTS = {EncoderDecoder: (TOKENS, TOKENS[:, :4]), DecoderOnly: (TOKENS,)}
INPUTS |= {MaskedLanguageModel: (TOKENS,)}
GPT = replace(
    LISTED,
    d_ff=15,
    num_encoder_layers=0,
    norm=NormOptions(placement="pre"),
    feed_forward=FeedForwardOptions("gelu_tanh"),
    embeddings=EmbeddingOptions(tied="output", scale=False),
    positions=Learned(),
)


class OwnBlock(Block):
    """A block with a parameter of its own."""

    def setup(self):
        super().setup()
        self.gain = self.param("gain", nn.initializers.ones, (1, 1, 1))

    def __call__(self, x, mask, **options):
        x, layer_cache = super().__call__(x, mask, **options)
        return x * self.gain, layer_cache


def total(model, params, *inputs):
    """A number that depends on all outputs, with dropout."""
    dropout_rng = DropoutRng.create(jax.random.key(3), jnp.array([4, 9]))
    found = model.apply({"params": params}, *inputs, dropout_rng=dropout_rng)
    return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(found))


def assert_close(given, expected):
    """The difference of two trees is at most a millionth of their size."""
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, given, expected))
    assert difference <= 1e-6 * optax.tree.norm(expected)


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        pytest.param(EncoderDecoder, REMAT["blocks"], marks=pytest.mark.long),
        (DecoderOnly, OwnBlock),
        pytest.param(MaskedLanguageModel, Block, marks=pytest.mark.slow),
        pytest.param(DecoderOnly, Block, marks=pytest.mark.slow),
        pytest.param(DecoderOnly, REMAT["matmuls"], marks=pytest.mark.slow),
    ],
)
def test_value_and_gradient_are_those_of_a_list_of_blocks_with_dropout(kind, block, random_params):
    models = [kind(config, block=block) for config in (LISTED, SCANNED)]
    params = random_params(models[0], *INPUTS[kind])

    @jax.jit
    def both(params):
        def value(model, params):
            return jax.value_and_grad(lambda p: total(model, p, *INPUTS[kind]))(params)

        listed, scanned = models
        return value(listed, params), value(scanned, stack_blocks(params))

    (value, gradient), (scanned_value, scanned_gradient) = both(params)
    assert_close(scanned_value, value)
    assert_close(unstack_blocks(scanned_gradient), gradient)


def test_layers_do_not_start_equal():
    params = jax.jit(DecoderOnly(SCANNED).init)(jax.random.key(0), TOKENS)["params"]
    kernel = params["decoder"]["stacked_blocks"]["feed_forward"]["up"]["kernel"]
    assert np.std(kernel) > 0.1 and np.abs(kernel[0] - kernel[1]).max() > 0.1


def searched(model, params):
    """Tokens and scores of beam search."""

    @jax.jit
    def run(params):
        cache = model.apply(
            {"params": params}, TOKENS, max_length=7, num_beams=4, method="init_cache"
        )
        bos, lengths = jnp.full(B, 1), jnp.full(B, 7)
        step = make_step_fn(model, params)
        return beam_search(step, cache, bos, lengths, SearchConfig(max_new_tokens=7))

    found = run(params)
    return found.tokens, found.scores


@pytest.mark.parametrize("in_int8", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_beam_search_finds_the_same_tokens(in_int8, random_params, assert_equal):
    found = []
    params = random_params(EncoderDecoder(LISTED), TOKENS, TOKENS)
    for config, given in ((LISTED, params), (SCANNED, stack_blocks(params))):
        model = EncoderDecoder(config)
        if in_int8:
            given = jax.jit(quantize, static_argnums=0)(model, given)
            model = Int8(model)
        found.append(searched(model, given))
    (tokens, scores), (scanned_tokens, scanned_scores) = found
    assert np.array_equal(scanned_tokens, tokens)
    # Rounding to 8 bits may turn a difference of the last bit into one of a step.
    assert_equal(scanned_scores, scores, 1e-3 if in_int8 else 1e-5)


@pytest.mark.parametrize(
    "name",
    ["muon", pytest.param("adam", marks=pytest.mark.slow)],
)
def test_an_optimizer_makes_the_same_updates(name, random_params):
    params = random_params(DecoderOnly(GPT), TOKENS)
    config = OptimizerConfig(
        name=name, schedule="constant", warmup_steps=1, weight_decay=0.1, grad_clip_norm=1.0
    )

    def updated(params, model):
        optimizer = make_optimizer(config, axes=parameter_axes(model))
        updates, _ = optimizer.update(jax.tree.map(jnp.sin, params), optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    updated = jax.jit(updated, static_argnums=1)
    stacked = updated(stack_blocks(params), DecoderOnly(replace(GPT, scan_layers=True)))
    assert_close(unstack_blocks(stacked), updated(params, DecoderOnly(GPT)))


def test_a_folder_of_transformers_holds_the_same_model(tmp_path, random_params):
    params = random_params(DecoderOnly(GPT), TOKENS)
    model = DecoderOnly(replace(GPT, scan_layers=True))
    save_pretrained(tmp_path / "gpt2", model, stack_blocks(params))
    found = load_pretrained(tmp_path / "gpt2")
    jax.tree.map(np.testing.assert_array_equal, found.params, params)
