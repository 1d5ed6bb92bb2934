"""Cost as a model grows: which sizes, and what is counted of them."""

from dataclasses import replace

import jax
import pytest

from experiments.benchmarks import report, scaling
from experiments.benchmarks.interleaved_timing import Summary, TimingConfig
from experiments.benchmarks.scaling import DecodingWork, ScalingOptions, TrainingWork
from experiments.benchmarks.subprocesses import compare
from experiments.benchmarks.train_cases import assemble
from experiments.harness.runs.run_folder import count
from experiments.language_modelling.presets import PRESETS
from jaxformer.distributed import single
from jaxformer.errors import ConfigError


def test_each_table_grows_one_size_and_leaves_the_others():
    tables = scaling.tables(ScalingOptions(layers=(2, 1_000)))
    layers = tables["a training step by layers"]
    assert list(layers) == ["num_decoder_layers 2", "num_decoder_layers 1,000"]
    (work,) = layers["num_decoder_layers 2"].args
    assert work == replace(work, model=replace(TrainingWork().model, num_decoder_layers=2))
    works = [
        make.args[0]
        for name, table in tables.items()
        if name in ("a step of decoding by source length", "by target length")
        for make in table.values()
    ]
    assert [(work.source_len, work.target_len) for work in works] == [
        *((size, 32) for size in (16, 64, 256)),
        *((16, size) for size in (16, 64, 256)),
    ]


def test_longer_sentences_are_fewer_and_lstms_have_as_many_parameters():
    tables = scaling.tables(ScalingOptions(sentence_lens=(16, 32)))
    makes = tables["of a translator by the length of sentences"]
    names = ["Transformer, length 16", "Transformer, length 32", "LSTMs, length 16"]
    assert list(makes)[:3] == names
    works = [make.args[0] for make in makes.values()]
    assert [(work.batch_size, work.seq_len) for work in works] == 2 * [(256, 16), (128, 32)]
    transformer, recurrent = (count_parameters(work) for work in (works[0], works[2]))
    assert transformer != recurrent == pytest.approx(transformer, rel=0.01)


def count_parameters(work):
    make_state, _, _ = assemble(work, single())
    return count(jax.eval_shape(make_state).params)


def test_the_step_is_gpt2s_but_for_its_sizes():
    published = PRESETS["gpt2_124m"].model
    sizes = {"d_model": 768, "d_ff": 3_072, "vocab_size": 50_257, "max_len": 1_024}
    assert replace(TrainingWork().model, **sizes, dtype="bfloat16") == published


def test_a_longer_source_costs_a_written_token_its_attention_alone():
    sizes = {"d_model": 64, "d_ff": 256, "num_heads": 1, "vocab_size": 11}
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    model = replace(DecodingWork().model, **sizes, **layers)
    work = DecodingWork(model, batch_size=3, source_len=16, target_len=7)
    short, long = (
        scaling.decode_case(one).metadata for one in (work, replace(work, source_len=256))
    )
    attention = long["of attention"] - short["of attention"]
    assert attention == 4 * 64 * 240
    # The products, and up to a sixteenth for the softmax of heads of 64.
    risen = long["FLOPs a token"] - short["FLOPs a token"]
    assert attention <= risen < (1 + 1 / 16) * attention


def test_metadata_are_columns_and_absent_ones_dashes():
    summary = Summary(0.5, 0.25, 0.1, 0.7, None)
    row = {
        name: column(summary, {"instructions": 1_234}) for name, column in scaling.COLUMNS.items()
    }
    assert list(row)[:3] == list(report.TIMES)
    assert (row["median, ms"], row["instructions"], row["FLOPs a token"]) == ("500.0", "1,234", "-")


def test_a_batch_that_devices_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="devices=3 do not divide batch_size=4: give divisors"):
        ScalingOptions(devices=(1, 3))


@pytest.mark.slow
def test_a_training_step_reports_its_compilation_time_on_any_devices():
    small = {"num_decoder_layers": 1, "d_model": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 11}
    work = TrainingWork(model=replace(TrainingWork().model, **small), batch_size=4, seq_len=5)
    makes = scaling.tables(ScalingOptions(training=work, devices=(1, 2)))["by simulated devices"]
    found = compare(makes, TimingConfig(rounds=1), peers=())
    assert list(found.measured) == ["devices 1", "devices 2"] and not found.missing
    for metadata in found.metadata.values():
        assert metadata["instructions"] > 100 and metadata["from the cache, s"] > 0
