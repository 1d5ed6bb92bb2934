"""Windows in some layers of a stack: what they see, and the base of their rotation."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxformer import AttentionMask, DecoderOnly
from jaxformer.config import Linear, Rotary, WindowOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.norm import Norm
from jaxformer.nn.recipe import make_stack
from jaxformer.nn.stacked_blocks import unstack_blocks
from tests.configs import small

B, T, V = 2, 7, 17
CONFIG = small(num_decoder_layers=3, norm__placement="pre")
CAUSAL = AttentionMask(causal=True)
GEMMA = replace(CONFIG, window=WindowOptions(2, full_every=2))
TOKENS = np.arange(B * T).reshape(B, T) * 5 % V


@pytest.fixture
def x(rng):
    return rng.standard_normal((B, T, 12), np.float32)


def bound(config, params):
    return make_stack(config, 1).make_block().bind({"params": params})


def test_the_smaller_of_two_windows_is_seen(x, random_params, assert_equal):
    windowed = replace(GEMMA, window=WindowOptions(3))
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
        expected = block(expected, mask, rotation=rotation)
    expected = Norm().apply({"params": layers["final_norm"]}, expected)
    assert_equal(found, expected)
    model = DecoderOnly(replace(both, num_decoder_layers=2))
    params = random_params(model, TOKENS)
    whole, cache = model.apply({"params": params}, TOKENS), model.empty_cache(B, 1, T)
    step = jax.jit(partial(model.apply, method="decode_step"))
    for t in range(T):
        logits, cache = step({"params": params}, TOKENS[:, None, t : t + 1], cache)
        assert_equal(logits[:, 0, 0], whole[:, t])


def test_a_base_of_windows_without_a_window_is_refused():
    with pytest.raises(ConfigError, match="window.size=None"):
        replace(CONFIG, positions=Rotary(window_base=5.0))
