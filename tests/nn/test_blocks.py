"""Blocks with parallel sub-layers, norms on both sides, soft caps; windows in some layers."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxformer import AttentionMask, DecoderOnly, TransformerConfig
from jaxformer.config import AttentionOptions, Linear, NormOptions, OutputOptions, Rotary
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import unstack_blocks
from jaxformer.nn.cache import init_cache
from jaxformer.nn.inspection import read_taps
from jaxformer.nn.layers import Norm
from jaxformer.nn.stack import make_stack

B, T, V = 2, 7, 17
CONFIG = TransformerConfig(
    vocab_size=V,
    d_model=12,
    d_ff=13,
    num_heads=3,
    num_decoder_layers=3,
    norm=NormOptions(placement="pre"),
)
CAUSAL = AttentionMask(causal=True)
GEMMA = replace(
    CONFIG,
    attention=AttentionOptions(window=2, full_every=2),
    output=OutputOptions(softcap=1.5),
)
TOKENS = np.arange(B * T).reshape(B, T) * 5 % V


@pytest.fixture
def x(rng):
    return rng.standard_normal((B, T, 12), np.float32)


def bound(config, params):
    return make_stack(config, 1).make_block().bind({"params": params})


def test_parallel_sublayers_read_the_same_vectors(x, random_params, assert_equal):
    config = replace(CONFIG, norm=NormOptions(placement="parallel"))
    params = random_params(make_stack(config, 1).make_block(), x, CAUSAL)
    block = bound(config, params)
    read = block.attention_norm(x), block.feed_forward_norm(x)
    expected = x + block.attention(read[0], mask=CAUSAL) + block.feed_forward(read[1])
    assert_equal(block(x, CAUSAL)[0], expected)
    assert np.abs(bound(CONFIG, params)(x, CAUSAL)[0] - expected).max() > 0.1


def test_a_sandwich_has_norms_before_and_after_each_sublayer(x, random_params, assert_equal):
    config = replace(CONFIG, norm=NormOptions("rms", placement="sandwich"))
    block = bound(config, random_params(make_stack(config, 1).make_block(), x, CAUSAL))
    attended = block.attention(block.attention_norm(x), mask=CAUSAL)
    y = x + block.attention_post_norm(attended)
    expected = y + block.feed_forward_post_norm(block.feed_forward(block.feed_forward_norm(y)))
    assert_equal(block(x, CAUSAL)[0], expected)


@pytest.fixture(scope="module")
def params(random_params):
    return random_params(DecoderOnly(GEMMA), TOKENS)


def weights_of(config, params):
    """The attention weights [B, N, T, T] of each layer."""
    names = [f"decoder/blocks_{i}/attention/weights" for i in range(3)]
    _, values = read_taps(DecoderOnly(config), params, TOKENS, names=names)
    return list(values.values())


def test_each_second_layer_attends_to_all_tokens_and_the_others_to_a_window(params):
    causal = np.tril(np.ones((T, T), bool))
    near = causal & ~np.tril(causal, -2)
    for weights, expected in zip(weights_of(GEMMA, params), (near, causal, near), strict=True):
        assert np.array_equal(weights > 0, np.broadcast_to(expected, weights.shape))


def test_the_smaller_of_two_windows_is_seen(x, random_params, assert_equal):
    windowed = replace(GEMMA, attention=AttentionOptions(window=3))
    params = random_params(make_stack(windowed, 1), x, CAUSAL)

    def seen(config, window):
        mask = AttentionMask(causal=True, window=window)
        return make_stack(config, 1).apply({"params": params}, x, mask)

    for window, least in ((2, 2), (5, 3), (None, 3)):
        assert_equal(seen(windowed, window), seen(CONFIG, least))
    assert np.abs(seen(CONFIG, 2) - seen(CONFIG, 3)).max() > 0.01


@pytest.mark.parametrize("scan", [False, True])
def test_layers_with_a_window_are_rotated_by_their_own_base(scan, x, random_params, assert_equal):
    scaled = Rotary(77.0, scaling=Linear(3.0))
    both = replace(GEMMA, positions=replace(scaled, window_base=5.0), scan_layers=scan)
    params = random_params(make_stack(both, 2), x, CAUSAL)
    found = make_stack(both, 2).apply({"params": params}, x, CAUSAL)
    layers, expected = unstack_blocks(params) if scan else params, x
    for i, (positions, window) in enumerate([(Rotary(5.0), 2), (scaled, None)]):
        rotation = positions.rotation(np.arange(T), both.key_size)
        mask = AttentionMask(causal=True, window=window)
        block = bound(both, layers[f"blocks_{i}"])
        expected, _ = block(expected, mask, rotation=rotation)
    expected = Norm().apply({"params": layers["final_norm"]}, expected)
    assert_equal(found, expected)
    model = DecoderOnly(replace(both, num_decoder_layers=2))
    params = random_params(model, TOKENS)
    whole, cache = model.apply({"params": params}, TOKENS), init_cache(model.config, B, 1, T)
    step = jax.jit(partial(model.apply, method="decode_step"))
    for t in range(T):
        logits, cache = step({"params": params}, TOKENS[:, None, t : t + 1], cache)
        assert_equal(logits[:, 0, 0], whole[:, t])


def test_a_base_of_windows_without_a_window_is_refused():
    with pytest.raises(ConfigError, match="attention.window=None: give a window"):
        replace(CONFIG, positions=Rotary(window_base=5.0))


def test_soft_caps_bound_the_logits_of_the_model_and_of_attention(params):
    large = jax.tree.map(lambda leaf: 5 * leaf, params)
    logits = DecoderOnly(GEMMA).apply({"params": large}, TOKENS)
    assert 1.4 < np.abs(logits).max() <= 1.5
    weights = weights_of(replace(GEMMA, attention=replace(GEMMA.attention, softcap=0.5)), large)[1][
        :, :, -1
    ]
    ratio = weights.max(-1) / weights.min(-1)  # of e^0.5 and e^-0.5 at most
    assert 2 < ratio.max() <= np.e + 1e-5


def test_the_divisor_of_the_logits_is_the_configs(params, assert_equal):
    doubled = jax.tree.map(lambda leaf: leaf, params)
    for i in range(3):
        query = doubled["decoder"][f"blocks_{i}"]["attention"]["query"]
        query["kernel"], query["bias"] = query["kernel"] * 2, query["bias"] * 2
    found = DecoderOnly(replace(GEMMA, attention=replace(GEMMA.attention, query_scalar=1.0))).apply(
        {"params": params}, TOKENS
    )
    assert_equal(found, DecoderOnly(GEMMA).apply({"params": doubled}, TOKENS))  # heads of 4
