"""Values inside a model: listed, recorded and replaced."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jaxformer as jf
from jaxformer.errors import ConfigError
from jaxformer.nn.inspection import Patched, read_taps, tap_names, with_attention_weights
from jaxformer.nn.int8 import quantize
from jaxformer.nn.remat import REMAT
from jaxformer.nn.taps import tap
from jaxformer.ops.attention import blockwise
from tests.configs import changed, small

TRANSLATOR = small(vocab_size=19, d_ff=14, num_encoder_layers=1, num_decoder_layers=1, max_len=29)
GPT = changed(
    TRANSLATOR,
    num_encoder_layers=0,
    num_decoder_layers=2,
    norm__placement="pre",
    attention__num_kv_heads=1,
    feed_forward__gated=True,
    positions=jf.Rotary(),
)
TOKENS = np.random.default_rng(1).integers(3, 19, (2, 7)).astype(np.int32)
SOURCE = np.random.default_rng(2).integers(3, 19, (2, 5)).astype(np.int32)
CROSS = "decoder/blocks_0/cross_attention"


@partial(jax.jit, static_argnums=0)
def call(model, params, *inputs):
    return model.apply({"params": params}, *inputs)


@partial(jax.jit, static_argnums=0)
def call_and_record(model, params, *inputs):
    return read_taps(model, params, *inputs)


class Case(NamedTuple):
    model: Any
    params: Any
    logits: jax.Array
    found: dict[str, jax.Array]

    @property
    def scanned(self):
        """The same model with its blocks in one loop."""
        config = replace(self.model.config, scan_layers=True)
        return type(self.model)(config), jf.stack_blocks(self.params)


@pytest.fixture(scope="module")
def gpt(random_params):
    model = jf.DecoderOnly(GPT)
    params = random_params(model, TOKENS)
    return Case(model, params, *call_and_record(model, params, TOKENS))


@pytest.fixture(scope="module")
def translator(random_params):
    model = jf.EncoderDecoder(TRANSLATOR)
    params = random_params(model, SOURCE, TOKENS)
    return Case(model, params, *call_and_record(model, params, SOURCE, TOKENS))


def without_head(params, block, attention):
    """A copy of `params` without head 2 of one attention."""
    params = jax.tree.map(np.copy, params)
    params["decoder"][block][attention]["out"]["kernel"][2] = 0.0
    return params


def test_the_values_of_a_model_have_stable_names():
    found = tap_names(jf.DecoderOnly(GPT), TOKENS)
    of_block = {
        "attention/queries": (2, 7, 3, 4),
        "attention/keys": (2, 7, 1, 4),
        "attention/values": (2, 7, 1, 4),
        "attention/weights": (2, 3, 7, 7),
        "attention/heads": (2, 7, 3, 4),
        "attention/output": (2, 7, 12),
        "after_attention": (2, 7, 12),
        "feed_forward/hidden": (2, 7, 14),
        "feed_forward/output": (2, 7, 12),
        "after_feed_forward": (2, 7, 12),
    }
    expected = {f"decoder/blocks_{i}/{name}": of_block[name] for i in (0, 1) for name in of_block}
    expected |= {"decoder/input": (2, 7, 12), "decoder/output": (2, 7, 12), "logits": (2, 7, 19)}
    assert {name: value.shape for name, value in found.items()} == expected
    scanned = tap_names(jf.DecoderOnly(replace(GPT, scan_layers=True)), TOKENS)
    assert {name: value.shape for name, value in scanned.items()} == expected
    of_translator = tap_names(jf.EncoderDecoder(TRANSLATOR))
    assert of_translator[f"{CROSS}/heads"].shape == (1, 1, 3, 4)
    assert "decoder/blocks_0/after_cross_attention" in of_translator
    assert "logits" in tap_names(jf.MaskedLanguageModel(TRANSLATOR))


def test_recorded_values_are_those_of_the_call(translator, assert_equal):
    model, params, logits, found = translator
    assert_equal(logits, call(model, params, SOURCE, TOKENS), 1e-6)
    assert np.array_equal(logits, found["logits"])
    assert {name: x.shape for name, x in found.items()} == {
        name: x.shape for name, x in tap_names(model, SOURCE, TOKENS).items()
    }
    weights, values = found[f"{CROSS}/weights"], found[f"{CROSS}/values"]
    gathered = np.einsum("bnts,bsnh->btnh", weights, values)
    assert_equal(found[f"{CROSS}/heads"], gathered)
    out = params["decoder"]["blocks_0"]["cross_attention"]["out"]
    projected = np.einsum("btnh,nhd->btd", gathered, out["kernel"]) + out["bias"]
    assert_equal(found[f"{CROSS}/output"], projected)


@pytest.mark.parametrize("scan", [False, True])
def test_each_value_replaced_by_itself_gives_the_same_logits_to_the_bit(gpt, scan):
    model, params, logits, found = gpt
    if scan:
        model, params = gpt.scanned
        logits, found = call_and_record(model, params, TOKENS)
    own = Patched(model, {name: lambda x, own=value: own for name, value in found.items()})
    assert np.array_equal(call(own, params, TOKENS), logits)


@pytest.mark.parametrize("scan", [False, True])
def test_a_head_set_to_zero_is_the_model_without_it(gpt, scan, assert_equal):
    expected = call(gpt.model, without_head(gpt.params, "blocks_1", "attention"), TOKENS)
    model, params = gpt.scanned if scan else gpt[:2]
    ablated = {"decoder/blocks_1/attention/heads": lambda x: x.at[:, :, 2].set(0.0)}
    assert_equal(call(Patched(model, ablated), params, TOKENS), expected, 1e-6)
    assert np.abs(gpt.logits - expected).max() > 1e-2


def test_attention_weights_can_be_replaced(translator, assert_equal):
    model, params, logits, found = translator
    uniform = Patched(model, {f"{CROSS}/weights": lambda x: jnp.full_like(x, 1 / 5)})
    given, inside = call_and_record(uniform, params, SOURCE, TOKENS)
    mean = np.broadcast_to(found[f"{CROSS}/values"].mean(axis=1, keepdims=True), (2, 7, 3, 4))
    assert_equal(inside[f"{CROSS}/heads"], mean)
    assert np.abs(given - logits).max() > 1e-2


def test_the_gradient_of_an_added_zero_is_a_finite_difference(gpt):
    name = "decoder/blocks_0/feed_forward/hidden"

    @jax.jit
    def loss(added):
        shifted = Patched(gpt.model, {name: lambda x: x + added})
        return jnp.mean(jnp.tanh(shifted.apply({"params": gpt.params}, TOKENS)))

    direction = np.random.default_rng(3).standard_normal((2, 7, 14)).astype(np.float32)
    slope = (loss(1e-2 * direction) - loss(-1e-2 * direction)) / 2e-2
    assert abs(slope) > 1e-3
    given = jnp.vdot(jax.jit(jax.grad(loss))(jnp.zeros_like(direction)), direction)
    np.testing.assert_allclose(given, slope, rtol=2e-3)


def test_blocks_that_recompute_are_replaced_with_the_same_gradient(gpt):
    found = []
    for block in (REMAT["none"], REMAT["blocks"]):
        model = jf.DecoderOnly(replace(GPT, num_decoder_layers=1), block=block)
        doubled = Patched(model, {"decoder/blocks_0/feed_forward/hidden": lambda x: 2.0 * x})

        def loss(params, model=doubled):
            return jnp.tanh(model.apply({"params": params}, TOKENS)).sum()

        params = dict(gpt.params, decoder=dict(gpt.params["decoder"]))
        del params["decoder"]["blocks_1"]
        found.append(jax.jit(jax.value_and_grad(loss))(params))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5), *found)


class Mean(nn.Module):
    """A module of one's own."""

    size: int = 5
    label: str = ""

    @nn.compact
    def __call__(self, x):
        return tap(self, "pooled", nn.Dense(self.size)(x).mean(axis=1))


X = np.random.default_rng(4).standard_normal((2, 7, 12)).astype(np.float32)


def test_a_module_of_ones_own_is_listed_with_its_inputs(random_params):
    params = random_params(Mean(), X)
    assert tap_names(Mean(), X)["pooled"].shape == (2, 5)
    halved = Patched(Mean(), {"pooled": lambda x: x / 2}, (X,))
    assert np.array_equal(2 * call(halved, params, X), call(Mean(), params, X))


def test_neither_an_earlier_nor_a_later_program_is_mistaken_for_a_patched_one(random_params):
    """The two traps of interceptors on a hidden stack: `jax.jit` does not see them."""
    model, fresh = Mean(3, "before"), Mean(3, "after")
    params = random_params(model, X)
    pooled = call(model, params, X)
    first = Patched(model, {"pooled": lambda x: 4.0 * x}, (X,))
    assert np.array_equal(call(Patched(fresh, first.replacements, (X,)), params, X), 4.0 * pooled)
    assert np.array_equal(call(fresh, params, X), pooled)
    assert np.array_equal(call(first, params, X), 4.0 * pooled)
    second = Patched(model, {"pooled": lambda x: 2.0 * x}, (X,))
    assert np.array_equal(call(second, params, X), 2.0 * pooled)


def test_a_patched_model_decodes_with_a_cache(translator, assert_equal):
    model, params = translator[:2]
    ablated = without_head(params, "blocks_0", "cross_attention")
    patched = Patched(model, {f"{CROSS}/heads": lambda x: x.at[:, :, 2].set(0.0)})

    @partial(jax.jit, static_argnums=0)
    def decode(model, params):
        apply = partial(model.apply, {"params": params})
        cache = apply(SOURCE, max_length=8, num_beams=2, method="init_cache")
        _, cache = apply(np.stack([TOKENS[:, :4]] * 2, axis=1), cache, method="decode_step")
        return apply(np.stack([TOKENS[:, 4:]] * 2, axis=1), cache, method="decode_step")[0]

    found = decode(patched, params)
    assert found.shape == (2, 2, 3, 19)
    assert_equal(found[:, 1], call(model, ablated, SOURCE, TOKENS)[:, 4:])


@pytest.mark.long
def test_a_model_in_8_bits_is_patched_too(gpt):
    params = jax.jit(quantize, static_argnums=0)(gpt.model, gpt.params)
    swapped = Patched(gpt.model, {"decoder/input": lambda x: x[::-1]})
    expected = call(gpt.model, params, TOKENS[::-1])
    assert np.array_equal(call(swapped, params, TOKENS), expected)


def test_other_attention_functions_keep_no_weights_and_say_what_to_do(gpt):
    name = "decoder/blocks_0/attention/weights"
    assert name not in tap_names(jf.DecoderOnly(GPT, blockwise))
    for model in (jf.DecoderOnly(GPT, blockwise), jf.DecoderOnly(GPT, block=REMAT["attention"])):
        with pytest.raises(ConfigError, match="with_attention_weights"):
            Patched(model, {name: lambda x: x})
        with pytest.raises(ConfigError, match="with_attention_weights"):
            jax.eval_shape(partial(read_taps, model, names=[name]), gpt.params, TOKENS)
        _, found = call_and_record(with_attention_weights(model), gpt.params, TOKENS)
        assert np.array_equal(found[name], gpt.found[name])


def test_names_and_shapes_that_do_not_fit_are_refused(gpt):
    near = (
        "no value named 'decoder/blocks_0/head', but one named 'decoder/blocks_0/attention/heads'"
    )
    with pytest.raises(ConfigError, match=near):
        Patched(gpt.model, {"decoder/blocks_0/head": lambda x: x})
    with pytest.raises(ConfigError, match="'x'.*tap_names"):
        jax.eval_shape(partial(read_taps, gpt.model, names=["x"]), gpt.params, TOKENS)
    with pytest.raises(ConfigError, match="mapping"):
        Patched(Patched(gpt.model, {}), {})
    for model, params in (gpt[:2], gpt.scanned):
        short = Patched(model, {"decoder/blocks_1/attention/heads": lambda x: x[:, :, :1]})
        with pytest.raises(ValueError, match=r"\(2, 7, 1, 4\)"):
            jax.eval_shape(lambda params, model=short: call(model, params, TOKENS), params)
