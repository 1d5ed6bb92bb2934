"""Programs compiled for TPUs that are not here. Compiling is not running: no speed, no results.

Run with `pytest -m compiler` on Python 3.12 with the extra `compilers`.
"""

import re
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from experiments.harness.planning.hlo import Program
from jaxformer import DecoderOnly, SamplingConfig, SearchConfig, beam_search, make_step_fn
from jaxformer.decoding import sample_more
from jaxformer.distributed import make_mesh, sharded, single
from jaxformer.nn.remat import REMAT
from jaxformer.ops.attention import auto_attention
from jaxformer.ops.dense import add_bias
from jaxformer.pipelines.reading import begin_rows
from jaxformer.pipelines.rows import search_more, state_shapes
from tests.compilers.conftest import CONFIG, compiled_step, counts
from tests.hlo import collectives

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4"])
@pytest.mark.parametrize("axes", ["data=2,fsdp=4,tensor=2", "fsdp=16"])
def test_a_sharded_step_compiles_with_flash_attention_in_each_layer(tpu_devices, topology, axes):
    mesh = make_mesh(axes, tpu_devices(topology))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    program, used = compiled_step(sharded(mesh), 16, rows)
    assert used == {"tpu_flash"}
    # forward and backward
    assert counts(program)["mosaic"] == 2 * CONFIG.num_decoder_layers


@pytest.mark.parametrize("remat", REMAT)
def test_flash_attention_is_kept_under_every_remat_policy(tpu_devices, remat):
    strategy = single(tpu_devices("v5e:2x2")[0])
    sharding = NamedSharding(strategy.mesh, PartitionSpec())
    program, used = compiled_step(strategy, 2, sharding, block=REMAT[remat])
    assert used == {"tpu_flash"}
    # the forward kernel runs a second time
    kernels = 2 if remat in ("none", "all_but_attention") else 3
    assert counts(program)["mosaic"] == kernels * CONFIG.num_decoder_layers


def decode(model, params, bos, limits):
    """A beam search of 16 texts."""
    cache = model.apply({"params": params}, 16, max_length=64, num_beams=4, method="init_cache")
    settings = SearchConfig(max_new_tokens=64)
    return beam_search(make_step_fn(model, params), cache, bos, limits, settings)


def test_a_step_of_beam_search_sorts_no_vocabulary(tpu_devices):
    where = SingleDeviceSharding(tpu_devices("v5e:2x2")[0])
    model = DecoderOnly(replace(CONFIG, vocab_size=5003))
    prompt = jnp.zeros((2, 3), jnp.int32)

    def leaf(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    params = jax.eval_shape(lambda: model.init(jax.random.key(0), prompt)["params"])
    numbers = leaf(jax.ShapeDtypeStruct((16,), jnp.int32))
    program = (
        jax.jit(partial(decode, model))
        .lower(jax.tree.map(leaf, params), numbers, numbers)
        .compile()
    )
    text = program.as_text() or ""
    sorted_sizes = re.findall(r"= \(?\w+\[([\d,]+)\]\S* .*?sort\(", text)
    assert sorted_sizes and all(int(sizes.split(",")[-1]) < 100 for sizes in sorted_sizes)
    # where nothing changes the logits, and where something does
    assert text.count('custom_call_target="TopK"') == 2


def test_the_gradient_of_a_bias_is_no_sum_on_the_vector_unit(tpu_devices):
    leaf = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(tpu_devices("v5e:2x2")[0]))

    def gradient(x, bias, d_out):
        return jax.vjp(add_bias, x, bias)[1](d_out)[1]

    x, bias = leaf((2, 1024, 768), jnp.bfloat16), leaf((768,), jnp.float32)
    text = jax.jit(gradient).lower(x, bias, x).compile().as_text() or ""
    assert " convolution(" in text and not re.search(r"= bf16\S+ reduce\(", text)


def test_beam_search_of_a_model_divided_over_four_chips_moves_no_parameter(tpu_devices):
    mesh = make_mesh("tensor=4", tpu_devices("v5e:2x2"))
    model = DecoderOnly(replace(CONFIG, d_model=512, d_ff=2048))
    strategy = sharded(mesh).for_model(model)

    def make_params():
        return model.init(jax.random.key(0), jnp.zeros((2, 3), jnp.int32))["params"]

    params = strategy.abstract(make_params)
    numbers = jax.ShapeDtypeStruct((16,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    with jax.set_mesh(mesh):
        program = jax.jit(partial(decode, model)).lower(params, numbers, numbers).compile()
    largest = max(leaf.size for leaf in jax.tree.leaves(params)) // 4
    moved = {each.size for each in collectives(program)}
    assert moved and max(moved) < largest


@pytest.mark.parametrize("rows", [8, 40])
def test_rows_at_positions_of_their_own_are_written_without_a_loop_over_them(tpu_devices, rows):
    """Texts that entered one after the other, on four chips that have two heads of keys each."""
    mesh = make_mesh("tensor=4", tpu_devices("v6e:2x2"))
    config = replace(CONFIG, vocab_size=4096, max_len=1024, d_model=512, d_ff=1024, num_heads=8)
    model = DecoderOnly(config, auto_attention)
    devices = sharded(mesh).for_model(model)
    prompt = jnp.zeros((2, 3), jnp.int32)
    params = devices.abstract(lambda: model.init(jax.random.key(0), prompt)["params"])
    sampling = SamplingConfig(max_new_tokens=1024)
    begin = partial(begin_rows, model, rows=rows, config=sampling, cache_length=1024)
    state = state_shapes(devices, rows, begin, params)
    for leaf in jax.tree.leaves(state.cache.layers):
        assert leaf.sharding.shard_shape(leaf.shape)[1] == leaf.shape[1] // 4
    stop, number = np.zeros(rows, bool), np.int32(1)
    with devices.active():
        lowered = search_more.lower(model, params, state, stop, number, number, more=sample_more)
        compiled = lowered.compile()
    program = Program(compiled.as_text() or "")
    loops = [run for run in program.executed if run.instruction.opcode == "while"]
    assert len(loops) == 1, "the loop over tokens"
    kernels = [run for run in program.executed if run.instruction.target == "tpu_custom_call"]
    for name in ("write_rows", "tpu_decode"):
        found = [run for run in kernels if name in run.instruction.op_name]
        assert len(found) == config.num_decoder_layers, name
    # Devices exchange the best of each, but to sort all logits: then each gets whole rows, once.
    part = rows * config.vocab_size // 4
    large = [each for each in collectives(compiled) if each.in_loop and each.size >= part]
    assert [each.kind for each in large] == ["all-gather"] and large[0].dtype == "f32"


def test_a_scanned_step_of_32_layers_compiles_as_fast_as_one_of_4(tpu_devices):
    strategy = single(tpu_devices("v5e:2x2")[0])
    sharding = NamedSharding(strategy.mesh, PartitionSpec())
    seconds = {}
    for layers in (4, 4, 32):  # the first compilation also starts the compiler
        config = replace(CONFIG, num_decoder_layers=layers, scan_layers=True)
        start = time.process_time()
        program, used = compiled_step(strategy, 2, sharding, config=config, block=REMAT["blocks"])
        seconds[layers] = time.process_time() - start
        assert used == {"tpu_flash"}
        kernels = (program.as_text() or "").count('custom_call_target="tpu_custom_call"')
        assert kernels == 3, "of one layer: forward, again, and backward"
        assert counts(program)["mosaic"] == 3 * layers
    assert seconds[32] <= 1.5 * seconds[4], seconds
