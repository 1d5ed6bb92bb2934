"""The measurements on a GPU: their sizes, and the same programs in small."""

import math
from dataclasses import replace

import pytest

from experiments.benchmarks import attention, gpu
from experiments.benchmarks.attention import Shape
from experiments.benchmarks.train import jax_step
from jaxformer.config import TRANSFORMER_BIG
from jaxformer.errors import ConfigError


def test_small_and_full_have_the_same_tables(tmp_path):
    small, full = (gpu.tables(given, tmp_path) for given in (True, False))
    assert list(small) == list(full) == list(gpu.TABLES)
    assert all(list(small[name]) == list(full[name]) for name in gpu.TABLES[:-1])
    steps = {name: [make.args[0] for make in full[name].values()] for name in gpu.TABLES[1:4]}
    assert [one.attention_fn for one in steps["gpt2_124m"]] == ["auto", "reference"]
    kept, remat = steps["gpt3_xl"][:3], steps["gpt3_xl"][3:]
    assert [(one.batch_size, one.remat) for one in kept] == [(n, "none") for n in (24, 16, 8)]
    assert [(one.batch_size, one.remat) for one in remat] == [(n, "blocks") for n in (64, 32, 16)]
    assert steps["translation"][1].model.d_model == TRANSFORMER_BIG.d_model
    assert {one.model.dtype for works in steps.values() for one in works} == {"bfloat16"}
    shapes = [
        make.args[1] if len(make.args) > 1 else make.args[0] for make in full["attention"].values()
    ]
    assert {shape.batch_size * shape.seq_len for shape in shapes} == {2**15}
    assert {shape.seq_len for shape in shapes} == {2**n for n in range(10, 16)}


def test_attention_counts_seven_products_of_what_is_seen():
    assert Shape(2, 4, num_heads=3, head_dim=5).flops() == 2 * 3 * 10 * 7 * 2 * 5


def test_products_and_attention_run_here_and_unsupported_functions_are_refused():
    case = gpu.matrix_product(8, "bfloat16")
    assert case.run().shape == (8, 8) and case.metadata["flops"] == 2 * 8**3
    shape = Shape(2, 4, num_heads=2, head_dim=8)
    value, gradient = attention.jax_attention("blockwise", shape, 2).run()
    assert value > 0 and [leaf.shape for leaf in gradient] == [(2, 4, 2, 8)] * 3
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        attention.jax_attention("cudnn", shape)


def test_an_unknown_table_is_refused():
    with pytest.raises(ConfigError, match="no table 'decode': choose among matrix_product"):
        gpu.GpuOptions(only=("decode",))


SMALL = [
    (table, name)
    for table in ("matrix_product", "gpt2_124m", "gpt3_xl", "translation", "beam_search")
    for name in gpu.tables(True, gpu.Path("unused"))[table]
]


def check(table, name, tmp_path):
    if table == "beam_search":
        gpu.write_model(gpu.decode_work(True), tmp_path / "marian")
    case = gpu.tables(True, tmp_path / "marian")[table][name]()
    case.wait(case.run())
    assert case.metadata.get("flops") or case.metadata["tokens"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("table", "name"), [one for one in SMALL if one[1] != "CTranslate2"])
def test_every_case_runs_small(table, name, tmp_path):
    check(table, name, tmp_path)


@pytest.mark.peer
def test_the_cases_of_the_peers_run_small(torch, tmp_path):
    pytest.importorskip("ctranslate2", reason="needs the extra peers")
    check("beam_search", "CTranslate2", tmp_path)
    check("attention", "PyTorch SDPA, T = 32", tmp_path)


@pytest.mark.slow
def test_a_small_training_learns_its_batches():
    work = gpu.tables(True, gpu.Path("unused"))["gpt2_124m"]["auto"].args[0]
    case = jax_step(gpu.small_step(replace(work, grad_accumulation=1)))
    losses = [case.run() for _ in range(33)]
    assert losses[-1] < losses[0] == pytest.approx(math.log(41), abs=0.5)
