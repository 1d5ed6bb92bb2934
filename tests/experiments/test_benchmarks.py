"""Benchmarks: the work that is measured, and the report of it."""

import jax
import pytest

from experiments.benchmarks import attention, decode, greedy_text, timing, train
from experiments.benchmarks.timing import Timing, Timings
from jaxformer.errors import ConfigError
from jaxformer.runtime import cpu_count

TIMINGS = Timings(
    {
        "jaxformer": Timing(0.0125, 0.01, 0.2, {"tokens": 24, "temporary_bytes": 2_500_000}, 0.5),
        "peer": Timing(0.025, 0.024, 0.0, {}, 1.0),
    },
    {"other": "torch is needed here"},
)


def test_the_table_has_a_row_for_each_and_a_sentence_for_each_that_is_missing():
    times = "|  | median, ms | least, ms | spread | of the best peer |"
    assert timing.table(TIMINGS).splitlines() == [
        f"{times} tokens a second | temporary, MB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| jaxformer | 12.5 | 10.0 | 20% | 0.50 | 1,920 | 2.5 |",
        "| peer | 25.0 | 24.0 | 0% | 1.00 | - | - |",
        "jaxformer: tokens 24, temporary_bytes 2500000",
        "not measured: other: torch is needed here",
    ]
    one = Timing(1e-6, 1e-6, 0.0, {"flops": 4_200_000, "peak_flops": 8.4e12})
    rate = timing.table(Timings({"a": one}, {})).splitlines()[2]
    assert rate == "| a | 0.0 | 0.0 | 0% | 4.2 | 50.0% |"


def test_the_environment_names_processor_and_versions():
    where = timing.environment()
    assert set(where) >= {"date", "cpu", "cores", "load", "python", "jaxlib", "flax", "torch"}
    assert where["jax"] == jax.__version__ and where["cores"] == cpu_count() >= 1 and where["cpu"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: decode.DecodeOptions(rounds=0), "rounds=0"),
        (lambda: greedy_text.GreedyText(prompt_len=0), "prompt_len=0"),
        (lambda: attention.Shape(seq_len=0), "seq_len=0"),
        (lambda: train.StepWork(attention_fn="fast"), "attention_fn='fast'"),
    ],
)
def test_options_that_measure_nothing_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_without_a_checkout_of_nanogpt_only_its_rows_are_absent(tmp_path):
    absent, present = train.StepOptions(), train.StepOptions(nanogpt=tmp_path)
    assert list(absent.cases()) == ["jaxformer", train.REFERENCE]
    assert set(present.cases()) == {
        "jaxformer",
        train.NANOGPT_COMPILED,
        train.NANOGPT_EAGER,
        train.REFERENCE,
    }
    with pytest.raises(ConfigError, match="model.py"):
        train.load_nanogpt(tmp_path)
