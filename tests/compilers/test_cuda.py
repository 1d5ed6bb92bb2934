"""Programs compiled for GPUs that are not here. Compiling is not running: no speed, no results.

Run with `pytest -m compiler` on Python 3.12 with the extra `cuda13`.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmarks.train import PRESETS
from experiments.harness.planning.collectives import collectives
from experiments.harness.planning.hlo import Program
from experiments.harness.planning.work import work
from experiments.harness.training.build import build_model
from experiments.harness.training.fewest_parts import fewest_parts, step_memory
from experiments.language_modelling.plan import planned
from experiments.language_modelling.presets import gpt2_124m
from experiments.translation import train as translation
from jaxformer import AttentionMask, DecoderOnly, EncoderDecoder, SamplingConfig, SearchConfig
from jaxformer.config import AttentionOptions, with_fields
from jaxformer.config.table_rows import take_rows
from jaxformer.decoding import beam_more, row_values, sample_more
from jaxformer.distributed import make_mesh, sharded, single
from jaxformer.nn.remat import REMAT
from jaxformer.ops.attention import auto_attention, gpu_flash
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.partitioning import divide_heads
from jaxformer.pipelines.decoding_weights import lay_out
from jaxformer.pipelines.reading import begin_rows
from jaxformer.pipelines.rows import search_more
from jaxformer.pipelines.sentences import begin_sentences
from jaxformer.runtime import GPU_OPTIONS
from tests.compilers.conftest import CONFIG, compiled_step, counts
from tests.compilers.recorded import Recorded
from tests.compilers.step_bytes import step_cost

pytestmark = pytest.mark.compiler

DROPOUT = replace(CONFIG, dropout_rate=0.1, attention=AttentionOptions(dropout_rate=0.1))


@pytest.mark.parametrize("config", [CONFIG, DROPOUT], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("remat", ["none", "blocks"])
def test_a_step_on_packed_documents_has_flash_attention_in_each_layer(h100s, config, remat):
    strategy = single(h100s(1)[0])
    sharding = NamedSharding(strategy.mesh, PartitionSpec())
    program, used = compiled_step(strategy, 2, sharding, config=config, block=REMAT[remat])
    found, layers, again = counts(program), config.num_decoder_layers, remat == "blocks"
    if config is DROPOUT:
        assert used == {"gpu_flash"}
        # forward, and backward for the queries and for keys and values; forward again with remat
        assert found["triton"] == (3 + again) * layers and not found["cudnn"]
    else:
        assert used == {"cudnn"}
        # forward and backward; beside it `gpu_flash`, which keeps nothing, for short documents
        assert found["cudnn"] == (2 + again) * layers and found["triton"] >= 4 * layers


@pytest.mark.parametrize("axes", ["data=2,fsdp=2,tensor=2", "fsdp=8"])
def test_a_sharded_step_compiles_with_flash_attention_in_each_layer(h100s, axes):
    mesh = make_mesh(axes, h100s(8))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    program, used = compiled_step(sharded(mesh), 8, rows, config=DROPOUT)
    assert used == {"gpu_flash"}
    assert counts(program)["triton"] == 3 * CONFIG.num_decoder_layers


@pytest.mark.parametrize("ids", [(), (1,), (1, 1), (5, 1)])
def test_a_lookup_in_a_table_of_divided_rows_moves_the_rows_alone(h100s, ids):
    mesh = make_mesh("fsdp=4", h100s(4))

    def leaf(dtype, spec, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    table = leaf(jnp.bfloat16, PartitionSpec("fsdp"), 512, 128)
    with jax.set_mesh(mesh):
        lowered = jax.jit(take_rows).lower(table, leaf(jnp.int32, PartitionSpec(), *ids))
    moved = collectives(Program(lowered.compile().as_text()))
    assert 0 < sum(each.bytes * each.times for each in moved) <= 5 * 128 * 2


@pytest.mark.parametrize("axes", ["data=4,tensor=2", "data=2,fsdp=2,sequence=2"])
def test_a_step_without_dropout_compiles_with_cudnn_on_a_mesh_with_several_axes(h100s, axes):
    mesh = make_mesh(axes, h100s(8))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    config = replace(CONFIG, num_decoder_layers=1)
    program, used = compiled_step(sharded(mesh), 8, rows, config=config, documents=False)
    assert used == {"cudnn"}
    assert counts(program)["cudnn"] == 2  # forward and backward


MESHES = [
    *("data=4,fsdp=2", "data=4,tensor=2", "data=4,sequence=2"),
    *("fsdp=4,tensor=2", "fsdp=4,sequence=2", "sequence=4,tensor=2"),
    *("data=2,fsdp=2,tensor=2", "data=2,fsdp=2,sequence=2"),
    *("data=2,sequence=2,tensor=2", "fsdp=2,sequence=2,tensor=2"),
]


@pytest.mark.parametrize("axes", MESHES)
def test_cudnn_computes_calls_of_all_families_on_every_mesh(h100s, axes):
    """A decoder's, one on packed documents, an encoder's, and cross-attention, in 8 rows."""
    mesh = make_mesh(axes, h100s(8))
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    rows = PartitionSpec(("data", "fsdp"))
    size, attention = 128, Recorded()

    def loss(q, other, real, segments):
        documents = {"query_segments": segments, "key_segments": segments}
        calls = [
            (q, AttentionMask(causal=True)),
            (q, AttentionMask(causal=True, **documents)),
            (q, AttentionMask(padding_mask=real[:, :size])),
            (other, AttentionMask(padding_mask=real)),
        ]
        outs = [attention(*divide_heads(q, k, k), mask, scale=0.1) for k, mask in calls]
        return sum(jnp.sum(out.astype(jnp.float32)) for out in outs)

    def leaf(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, rows))

    arrays = (
        leaf(jnp.bfloat16, 8, size, 8, 64),
        leaf(jnp.bfloat16, 8, 2 * size, 8, 64),
        leaf(jnp.bool_, 8, 2 * size),
        leaf(jnp.int32, 8, size),
    )

    @partial(
        jax.shard_map,
        in_specs=rows,
        out_specs=rows,
        axis_names={"data", "fsdp"},
        check_vma=False,
    )
    def gradient(*arrays):
        return jax.grad(loss, (0, 1))(*arrays)

    with jax.set_mesh(mesh):
        program = jax.jit(gradient).lower(*arrays).compile()
    assert {(name, spec.batch) for name, spec in attention.calls} == {("cudnn", 8 // parts)}
    assert counts(program)["cudnn"] == 4 * 2


@pytest.mark.parametrize("check_vma", [False, True])
def test_documents_have_cudnn_in_a_map_over_all_axes_whatever_check_vma_is(h100s, check_vma):
    mesh = Mesh(np.array(h100s(4)).reshape(2, 2), ("data", "tensor"))
    rows = PartitionSpec("data")

    @partial(jax.shard_map, in_specs=rows, out_specs=rows, check_vma=check_vma)
    def gradient(q, segments):
        mask = AttentionMask(causal=True, query_segments=segments, key_segments=segments)

        def total(q):
            return jnp.sum(auto_attention(q, q, q, mask, scale=0.1).astype(jnp.float32))

        return jax.grad(total)(q)

    leaf = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, rows))
    with jax.set_mesh(mesh):
        lowered = jax.jit(gradient).lower(
            leaf((6, 256, 4, 64), jnp.bfloat16), leaf((6, 256), jnp.int32)
        )
    text = lowered.as_text()
    assert text.count("__cudnn$fmha") >= 2 and "triton" in text


def test_heads_of_256_have_cudnn_on_a_hopper_that_is_not_here(h100s):
    mesh = Mesh([h100s(1)[0]], ("data",))
    leaf = jax.ShapeDtypeStruct((2, 64, 3, 256), jnp.bfloat16)
    leaf = leaf.update(sharding=NamedSharding(mesh, PartitionSpec()))
    attention = Recorded()

    def loss(*inputs):
        return jnp.sum(attention(*inputs, AttentionMask(causal=True), scale=0.1, bias=None))

    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(leaf, leaf, leaf).compile()
    assert counts(program)["cudnn"] == 2


CALLS = {
    # T, S, heads, sizes of keys and values, dtype
    "h100 bfloat16": (1024, 1024, (12, 12), (64, 64), jnp.bfloat16),
    "h100 float16": (640, 640, (6, 2), (128, 128), jnp.float16),
    "h100 odd": (37, 1000, (6, 3), (40, 24), jnp.bfloat16),
    # which needs the most of the shared memory, and an L4 the least of it
    "l4 float32": (384, 384, (4, 4), (128, 128), jnp.float32),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_mask_and_dropout_compile_in_one_call(gpus, name):
    queries, keys, heads, sizes, dtype = CALLS[name]
    mesh = Mesh(gpus(name.split()[0], 1), ("data",))
    where = NamedSharding(mesh, PartitionSpec())

    def leaf(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def loss(inputs, mask, dropout_rng):
        dropout = DropoutMask(dropout_rng, "weights", 0.1)
        return jnp.sum(gpu_flash(*inputs, mask, scale=0.125, dropout=dropout).astype(jnp.float32))

    inputs = (
        leaf(dtype, 2, queries, heads[0], sizes[0]),
        leaf(dtype, 2, keys, heads[1], sizes[0]),
        leaf(dtype, 2, keys, heads[1], sizes[1]),
    )
    mask = AttentionMask(
        causal=True,
        window=200,
        offset=leaf(jnp.int32),
        padding_mask=leaf(jnp.bool_, 2, keys),
        query_segments=leaf(jnp.int32, 2, queries),
        key_segments=leaf(jnp.int32, 2, keys),
    )
    dropout_rng = DropoutRng(leaf(jnp.uint32, 2), leaf(jnp.int32, 2))
    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(loss)).lower(inputs, mask, dropout_rng).compile()
    assert counts(program)["triton"] == 3


# Without a device the compiler cannot time products: those of cuBLAS add biases as they do there.
CUBLAS = {"xla_gpu_enable_triton_gemm": False}


def gpt2_step(device, layers):
    """The training step of GPT-2's model: 64 rows of 1,024 tokens in bfloat16, no documents."""
    config = replace(gpt2_124m.model, num_decoder_layers=layers)
    strategy = single(device)
    sharding = NamedSharding(strategy.mesh, PartitionSpec())
    options = {"documents": False, "compiler_options": CUBLAS}
    program, used = compiled_step(strategy, 64, sharding, config=config, **options)
    assert used == {"cudnn"}
    return program, work(Program(program.as_text())).bytes


def test_a_step_of_gpt2_moves_at_most_210_gb_on_an_h100(h100s):
    two, of_two = gpt2_step(h100s(1)[0], 2)
    assert two.memory_analysis().temp_size_in_bytes <= 16 * 2**30
    _, of_three = gpt2_step(h100s(1)[0], 3)
    more = gpt2_124m.model.num_decoder_layers - 2
    assert of_two + more * (of_three - of_two) <= 210e9


def test_the_rows_that_fit_an_h100_are_known_from_two_programs_of_fewer(h100s):
    """GPT-2's preset, with its documents: 40 parts of 12 rows are for chips of 16 GB."""
    model = planned.build_model(gpt2_124m).clone(attention_fn=auto_attention)
    batch, strategy = planned.batch(gpt2_124m), single(h100s(1)[0]).for_model(model)
    memory_of = partial(step_memory, gpt2_124m, planned.make_step, model, batch, strategy)
    known = {parts: memory_of(parts) for parts in (40, 32, 8)}
    assert known[8] < 0.9 * 80e9 < known[40] * 480 / 40
    assert fewest_parts(known.__getitem__, 0.9 * 80e9, 480, 40) == 4
    # with just the memory of 8 parts it is 8 of them
    assert fewest_parts(known.__getitem__, 1.01 * known[8], 480, 40) == 8


def search_step(device, model, begin, more, prompts):
    """The cost of a step of writing, and the bytes of the weights and of the cache.

    Of parameters in float32, as a run has them; in 16 bits once, before the first step.
    """
    devices = single(device)
    where = NamedSharding(devices.mesh, PartitionSpec())

    def shapes(function, *arguments):
        return jax.tree.map(
            lambda leaf: leaf.update(sharding=where), jax.eval_shape(function, *arguments)
        )

    def make_params():
        prompt = jnp.zeros((2, 3), jnp.int32)
        return model.init(jax.random.key(0), *[prompt] * prompts)["params"]

    params = shapes(lambda: lay_out(model, make_params())[1])
    state = shapes(lambda params: begin(params=params), params)
    numbers = shapes(lambda: (jnp.zeros_like(state.stopped), jnp.int32(0), jnp.int32(0)))
    with devices.active():
        program = search_more.lower(model, params, state, *numbers, more=more).compile()
    read = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, state.cache)))
    return step_cost(Program(program.as_text())), read


@pytest.mark.parametrize(("texts", "kernels"), [(1, 199), (32, 182)])
def test_a_step_of_writing_is_few_kernels_that_read_weights_and_cache_on_an_h100(
    h100s, texts, kernels
):
    model = DecoderOnly(gpt2_124m.model)
    sampling = SamplingConfig(max_new_tokens=1024)
    options = {"rows": texts, "config": sampling, "eos": (5,), "cache_length": 1024}
    begin = partial(begin_rows, model, **options)
    cost, read = search_step(h100s(1)[0], model, begin, sample_more, 1)
    assert cost.bytes <= 1.2 * read
    assert cost.kernels <= kernels, cost


def test_a_step_of_beam_search_copies_no_logits_on_an_h100(h100s):
    """128 texts in 4 beams: logits are written once, and read for their norm and for the best."""
    model, texts = EncoderDecoder(PRESETS["wmt14_base"].work.model), 128
    search = SearchConfig(beam_size=4, max_new_tokens=64)
    arrays = jnp.zeros((texts, 32), jnp.int32), jnp.zeros(texts, jnp.int32)
    options = {"bos": 1, "pad": 0, "search": search}

    def begin(params):
        return begin_sentences(model, params, *arrays, row_values(search, texts), **options)

    cost, _ = search_step(h100s(1)[0], model, begin, beam_more, 2)
    assert cost.bytes <= 1.27e9
    assert cost.kernels <= 166, cost


def test_the_options_of_a_gpu_spare_a_translator_the_copies_of_joined_products(h100s):
    work_of = PRESETS["wmt14_base"].work
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    config = replace(work_of, model=with_fields(work_of.model, layers)).config()
    model, batch = build_model(config), work_of.random_batch(np.random.default_rng(0))
    devices = single(h100s(1)[0]).for_model(model)
    make_state, step = translation.make_step(config, model, batch, devices)
    where = NamedSharding(devices.mesh, PartitionSpec())
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), batch)
    lowered = step.lower(devices.abstract(make_state), batch)
    moved = [
        work(Program(lowered.compile(compiler_options=CUBLAS | options).as_text())).bytes
        for options in ({}, GPU_OPTIONS)
    ]
    assert moved[1] < moved[0] - 0.2e9, moved
