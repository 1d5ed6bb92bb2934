"""Weights in 8 bits: the model computed in float with every number rounded, by whole numbers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxformer.nn.dense import Dense
from jaxformer.nn.embeddings import LMHead
from jaxformer.nn.int8 import quantize
from jaxformer.nn.models import DecoderOnly, EncoderDecoder
from jaxformer.ops.dense import QuantizedMatrix
from tests.configs import small
from tests.pretrained.models import LLAMA, MODELS, inputs_of

pytestmark = pytest.mark.long

TRANSLATOR = small(
    vocab_size=29,
    d_model=26,
    d_ff=62,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    output__bias=True,
)
GPT = replace(LLAMA, d_model=26, d_ff=62, vocab_size=29, num_decoder_layers=1)
IDS = np.random.default_rng(3).integers(4, 29, (3, 11), np.int32)


def rounded(x, axes):
    """`x` in steps of its largest number along `axes` over 127; zeros stay."""
    scale = jnp.abs(x).max(axis=axes, keepdims=True) / 127
    scale = jnp.where(scale > 0, scale, 1.0)
    return jnp.round(x / scale) * scale


def representable(model, params):
    """`params` with the numbers that their 8 bits stand for: quantized again they do not change."""

    def one(path, leaf, matrix):
        if not isinstance(matrix, QuantizedMatrix):
            return leaf
        whole = np.asarray(matrix.values) * np.asarray(matrix.scale)[:, None]
        is_dense = path[-1].key != "table"
        return (whole.T if is_dense else whole).reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(one, params, quantize(model, params))


def with_rounded_rows(call, args, kwargs, context):
    """The inputs of dense layers and of the output layer, each row rounded."""
    module, x = context.module, args[0] if args else None
    if context.method_name == "__call__" and isinstance(module, Dense | LMHead):
        axes = (-2, -1)[-getattr(module, "num_inputs", 1) :]
        return call(rounded(x, axes), *args[1:], **kwargs)
    return call(*args, **kwargs)


def build(random_params, config):
    if config.num_encoder_layers:
        model = EncoderDecoder(config)
        return model, random_params(model, IDS, IDS), (IDS[:, :7], IDS)
    model = DecoderOnly(config)
    return model, random_params(model, IDS), (IDS,)


FAMILIES = ("gpt2", "llama", "gemma2", "gpt_neox", "t5", "marian, two vocabularies")
_UNOPTIMIZED = {"xla_backend_optimization_level": 0}


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_8_bits_hold_give_each_family_the_logits_of_floats(random_params, name):
    _, model = MODELS[name]
    ids = inputs_of(model)[::-1]
    params = representable(model, random_params(model, *ids))

    @partial(jax.jit, compiler_options=_UNOPTIMIZED)
    def logits(in_8_bits, params):
        with nn.intercept_methods(with_rounded_rows):
            expected = model.apply({"params": params}, *ids)
        floats = model.apply({"params": params}, *ids)
        return model.apply({"params": in_8_bits}, *ids), expected, floats

    in_8_bits, expected, floats = map(np.asarray, logits(quantize(model, params), params))
    assert in_8_bits.dtype == expected.dtype == np.float32
    differences = np.abs(in_8_bits - expected) / np.abs(expected).max()
    # A number halfway between two of 8 bits may be rounded either way, and changes its text a bit.
    assert np.median(differences) < 1e-5 and differences.max() < 0.03
    assert 1e-4 < np.linalg.norm(in_8_bits - floats) / np.linalg.norm(floats) < 0.05


def test_each_output_of_a_kernel_and_each_row_of_a_table_has_a_scale_of_its_own(random_params):
    model, params, _ = build(random_params, TRANSLATOR)
    params["decoder"]["blocks_0"]["feed_forward"]["up"]["kernel"][:, 5] *= 1000
    params["embedding"]["table"][7] = 0
    found = quantize(model, params)
    up = found["decoder"]["blocks_0"]["feed_forward"]["up"]["kernel"]
    assert up.values.dtype == jnp.int8 and up.scale.shape == (62,)
    assert (np.abs(up.values).max(1) == 127).all()
    table = found["embedding"]["table"]
    assert table.scale.shape == (29,) and not np.asarray(table.values[7]).any()
    out = found["decoder"]["blocks_0"]["attention"]["out"]["kernel"]
    assert out.scale.shape == (26,) and out.values.shape == (26, 26)
    kept = [path for path, leaf in leaves(found) if not isinstance(leaf, QuantizedMatrix)]
    assert all("bias" in path or "scale" in path for path in kept), "and norms stay as they are"


def leaves(tree):
    found = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, QuantizedMatrix)
    )
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_multiplies_weights_in_8_bits_and_never_a_single_row(random_params, rows):
    """For a single row of 8 bits XLA on a CPU has a loop that takes 20 times as long."""
    model, params, _ = build(random_params, GPT)
    params = quantize(model, params)
    cache = model.apply({"params": params}, rows, max_length=5, method="init_cache")

    def step(params, cache):
        return model.apply({"params": params}, IDS[:rows, None, :1], cache, method="decode_step")

    lines = jax.jit(step).lower(params, cache).as_text().splitlines()
    products = [line for line in lines if "dot_general" in line]
    whole = [line for line in products if "xi8>" in line]
    assert len(whole) == 8, "query, key, value, out, gate, up, down and the output"
    assert len(products) - len(whole) == 2, "attention's own"
    assert all(f"tensor<{max(rows, 2)}x" in line for line in whole)
