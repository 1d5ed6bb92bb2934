"""Cost as a model grows: which sizes, and what is counted of them."""

from dataclasses import replace

import pytest

from experiments.benchmarks import report, scaling
from experiments.benchmarks.interleaved_timing import Summary, TimingConfig
from experiments.benchmarks.scaling import Decoding, ScalingOptions, Training
from experiments.benchmarks.subprocesses import compare
from experiments.language_modelling.presets import PRESETS
from jaxformer.errors import ConfigError

SMALL = Decoding(layers=1, d_model=64, heads=1, vocabulary=11, rows=3, source=16, target=7)


def test_each_table_grows_one_size_and_leaves_the_others():
    tables = scaling.subjects(ScalingOptions(layers=(2, 1_000)))
    layers = tables["a training step by layers"]
    assert list(layers) == ["layers 2", "layers 1,000"]
    assert [make.args for make in layers.values()] == [
        (Training(layers=2),),
        (Training(layers=1_000),),
    ]
    words = [
        make.args[0]
        for name, table in tables.items()
        if "length" in name
        for make in table.values()
    ]
    assert [(word.source, word.target) for word in words] == [
        *((size, 32) for size in (16, 64, 256)),
        *((16, size) for size in (16, 64, 256)),
    ]


def test_the_step_is_gpt2s_but_for_its_sizes():
    published = PRESETS["gpt2_124m"].model
    sizes = {"d_model": 768, "d_ff": 3_072, "vocab_size": 50_257, "max_len": 1_024}
    assert replace(Training().config(), **sizes, dtype="bfloat16") == published


def test_a_longer_source_costs_a_written_token_its_attention_alone():
    works = SMALL, replace(SMALL, source=256)
    short, long = (scaling.decoding(work).facts for work in works)
    attention = long["of attention"] - short["of attention"]
    assert attention == 4 * 64 * 240
    # The products, and up to a sixteenth for the softmax of heads of 64.
    risen = long["FLOPs a token"] - short["FLOPs a token"]
    assert attention <= risen < (1 + 1 / 16) * attention


def test_facts_are_columns_and_absent_ones_dashes():
    summary = Summary(0.5, 0.25, 0.1, 0.7, None)
    row = {
        name: column(summary, {"instructions": 1_234}) for name, column in scaling.COLUMNS.items()
    }
    assert list(row)[:3] == list(report.TIMES)[:3]
    assert (row["median, ms"], row["instructions"], row["FLOPs a token"]) == ("500.0", "1,234", "-")


def test_rows_that_devices_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="devices=3 do not divide training.rows=4: give divisors"):
        ScalingOptions(devices=(1, 3))


@pytest.mark.slow
def test_a_training_step_tells_how_long_it_was_compiled_on_any_devices():
    small = Training(layers=1, d_model=8, heads=2, vocabulary=11, rows=4, length=5)
    makes = scaling.subjects(ScalingOptions(training=small, devices=(1, 2)))["by simulated devices"]
    found = compare(makes, TimingConfig(rounds=1), peers=())
    assert list(found.measured) == ["devices 1", "devices 2"] and not found.missing
    for facts in found.facts.values():
        assert facts["instructions"] > 100 and facts["from the cache, s"] > 0
