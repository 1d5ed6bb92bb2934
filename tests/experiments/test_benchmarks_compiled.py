"""The programs that are compiled for a TPU beside MaxText's."""

import math

import pytest

from experiments import results
from experiments.benchmarks import compiled
from experiments.harness.planning import parse_target
from jaxformer.distributed import parse_mesh
from jaxformer.errors import ConfigError


def test_every_program_has_the_rows_tokens_and_devices_that_its_comparison_needs():
    for name in compiled.RUNS:
        config = compiled.config_of(name)
        assert config.training.attention_fn == "auto", name
        devices, mesh = parse_target(config.target).count or 1, parse_mesh(config.mesh)
        assert math.prod(mesh.values()) in (1, devices), name
        assert config.strategy == ("sharded" if config.mesh else config.strategy), name
    for name in compiled.STEPS:  # every chip has the rows that MaxText had
        config = compiled.config_of(name)
        parts = config.training.grad_accumulation * parse_mesh(config.mesh).get("fsdp", 1)
        assert config.data.batch_size == 12 * parts and config.training.attention_fn == "auto"
    for name in compiled.GROWTH:  # every part has as many tokens, whatever grows
        config = compiled.config_of(name)
        rows = config.data.batch_size / config.training.grad_accumulation
        assert rows * config.data.seq_len == 12_288


def test_a_program_that_there_is_not_is_named():
    with pytest.raises(
        ConfigError, match="only has 'two parts': give one of jaxformer, nothing recomputed; jax"
    ):
        compiled.CompiledOptions(only=("jaxformer, blocks recomputed", "two parts"))


def test_numbers_without_seeds_have_a_row_for_each_system():
    result = results.Result(table="t", system="s", metric="m", score=13.5, seeds=[])
    other = results.Result(table="t", system="u", metric="n", score=17, seeds=[])
    table = results.table_of([result, other])
    assert table.titles == ("system", "m", "n")
    assert table.rows == [("s", "13.5", "-"), ("u", "-", "17")]
    drawn = results.Result(table="t", system="s", metric="m", score=13.5, seeds=[0])
    assert len(results.table_of([result, drawn]).titles) == 5


def test_a_larger_number_has_fewer_decimals():
    texts = {0.51237: "0.5124", 3.25: "3.25", 25.066: "25.07", 17: "17", 6200.0: "6,200"}
    for score, text in texts.items():
        result = results.Result(table="t", system="s", metric="m", score=score, seeds=[])
        assert results.table_of([result]).rows == [("s", text)]
