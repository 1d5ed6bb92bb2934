"""The numbers of each step that are logged and shown."""

import io
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.runs.run_folder import Run
from experiments.harness.training.pace import lagging
from experiments.harness.training.progress import Progress
from experiments.harness.training.session import describe_plan
from experiments.harness.training.utilization import memory_in_use
from experiments.language_modelling.presets import PRESETS as LANGUAGE_PRESETS
from experiments.translation.presets import PRESETS as TRANSLATION_PRESETS
from jaxformer import optional_dependencies
from jaxformer.errors import Diverged
from tests.experiments.test_distributed import begin_two, finished
from tests.experiments.test_training_config import LANGUAGE


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


class Clock:
    seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def run(tmp_path):
    with_log = Run(tmp_path)
    yield with_log
    with_log.close()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def started(run, stream, clock):
    """Progress of so many steps, all logged unless `log_every` says otherwise."""

    def start(total, **options):
        given = {"log_every": 1, "stream": stream, "clock": clock}
        return Progress(total, run, **given | options)

    return start


def metrics(loss=2.0, tokens=70, in_a_row=0):
    return {
        "loss": jnp.float32(loss * tokens),
        "tokens": jnp.int32(tokens),
        "grad_norm": jnp.float32(0.5),
        "skipped": jnp.int32(in_a_row),
        "consecutive_skips": jnp.int32(in_a_row),
    }


def train(progress, clock, steps):
    with progress:
        for step in steps:
            progress.add(step, metrics(loss=step), positions=80)
            clock.seconds += 10.0


def test_the_logged_numbers_are_those_of_the_step(started, run, clock):
    with started(7, log_every=3) as progress:
        for step in range(1, 8):
            progress.add(step, metrics(loss=step), positions=80)
            clock.seconds += 10.0 if step < 4 else 5.0
    # 70 tokens every 10 seconds, later every 5; 10 of 80 positions are padding
    expected = [(3, 7.0), (6, 14.0), (7, 14.0)]
    assert run.metrics() == [
        {
            "step": step,
            "loss": step,
            "grad_norm": 0.5,
            "padding": 0.125,
            "tokens_per_second": speed,
            "data_wait": 0.0,
        }
        for step, speed in expected
    ]


def test_the_learning_rate_is_that_of_the_update_and_a_skipped_step_is_none(started, run):
    rates = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    with started(5, learning_rates=rates) as progress:
        for step, skipped in enumerate((0, 0, 1, 1, 1), start=1):
            progress.add(step, metrics() | {"skipped": jnp.int32(skipped)}, positions=80)
    assert [line["learning_rate"] for line in run.metrics()] == [0.0, 1.0, 1.0, 2.0, 3.0]


def test_auxiliary_sums_are_logged_per_token_as_the_loss_is(started, run):
    with started(3) as progress:
        progress.add(1, {**metrics(loss=2.0), "correct": jnp.int32(21)}, positions=80)
    assert run.metrics()[0]["correct"] == pytest.approx(21 / 70, rel=1e-6)


def test_a_resumed_run_logs_the_same_lines_but_for_the_speed(started, run, clock):
    train(started(7, log_every=2), clock, range(1, 8))
    whole = run.metrics()
    run.resume(3)
    train(started(7, log_every=2), clock, range(4, 8))
    again = run.metrics()
    for line in whole + again:
        line.pop("tokens_per_second", None), line.pop("data_wait", None)
    assert again == whole


def test_a_loss_that_is_no_number_is_left_out_of_the_log_and_the_step_counted(started, run):
    with started(97) as progress:
        for step, loss in ((1, 2.0), (2, float("nan")), (3, float("inf"))):
            progress.add(step, metrics(loss=loss, in_a_row=step - 1), 80)
    logged = run.metrics()
    assert [line.get("loss") for line in logged] == [2.0, None, None]
    assert [line.get("skipped") for line in logged] == [None, 1.0, 2.0]
    assert "consecutive_skips" not in logged[2]


def test_too_many_of_them_in_a_row_end_the_training_and_name_the_step(started, run):
    said = "10 steps in a row, the last of them step 12 "
    with pytest.raises(Diverged, match=said), started(97) as progress:
        progress.add(12, metrics(loss=float("nan"), in_a_row=10), 80)
        progress.settle()
    assert run.metrics() == []


def test_an_interval_of_zero_logs_the_last_step_only(started, run, clock):
    train(started(5, log_every=0), clock, range(1, 6))
    assert [line["step"] for line in run.metrics()] == [5]


def test_a_step_is_fetched_when_the_next_is_added_or_before_a_save(started, run):
    with started(97) as progress:
        progress.add(1, metrics(), 80)
        assert run.metrics() == []
        progress.add(2, metrics(), 80)
        assert [line["step"] for line in run.metrics()] == [1]
        progress.settle()
        progress.settle()
        assert [line["step"] for line in run.metrics()] == [1, 2]


@pytest.mark.parametrize(("error", "steps"), [(KeyboardInterrupt, [1, 2]), (ValueError, [1])])
def test_a_stop_on_request_logs_the_last_step_and_a_bug_does_not(started, run, error, steps):
    with pytest.raises(error), started(97) as progress:
        progress.add(1, metrics(), 80)
        progress.add(2, metrics(), 80)
        raise error
    assert [line["step"] for line in run.metrics()] == steps


def test_a_log_gets_whole_lines_at_the_interval_and_the_last_one(started, stream, clock):
    train(started(97, log_every=50, every=30.0), clock, range(1, 9))
    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    assert [line.split()[1] for line in lines] == ["1/97", "4/97", "7/97", "8/97"]
    assert lines[0] == "step 1/97  loss 1.0000  tokens/s -  padding 12.5%  left -"
    # 93 steps of 10 seconds to go
    assert lines[1] == "step 4/97  loss 4.0000  tokens/s 7  padding 12.5%  left 0:15:30"


def test_the_time_left_says_that_it_lacks_the_evaluations_until_one_was_measured(
    started, stream, clock
):
    with started(4, pause_every=2, every=0.0) as progress:
        for step in (1, 2, 3):
            progress.add(step, metrics(), positions=80)
            clock.seconds += 10.0
            if step == 2:
                with progress.pause("evaluating"):
                    clock.seconds += 7.0
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert lines[1].endswith("left 0:00:20 + evaluations")
    assert lines[2].endswith("left 0:00:31")  # a step and three evaluations


@pytest.mark.parametrize("presets", [TRANSLATION_PRESETS, LANGUAGE_PRESETS])
def test_the_first_lines_of_a_training_say_what_it_does_and_how_long_it_took(presets):
    first = next(iter(presets.values()))
    for name, (steps, took) in first.measured.items():
        assert presets[name].optimizer.total_steps == steps
        said = describe_plan(presets[name], "1 x cpu", Path("runs/x"))
        assert f"{steps:,} steps on 1 x cpu" in said and f"{name} took {took}" in said
        assert f"saved every {presets[name].training.save_every:,}" in said
    shorter = replace(first, optimizer=replace(first.optimizer, total_steps=997))
    assert "took" not in describe_plan(shorter, "8 x NVIDIA H100", Path("runs/x"))


def test_the_last_line_is_not_printed_twice(started, stream, clock):
    train(started(1, log_every=50, every=0.0), clock, [1])
    assert stream.getvalue().count("\n") == 1


def test_a_batch_of_padding_alone_has_no_loss_and_no_error(started, run):
    with started(1) as progress:
        progress.add(1, metrics(tokens=0), 80)
    assert (run.metrics()[0]["loss"], run.metrics()[0]["padding"]) == (0.0, 1.0)


def test_a_terminal_gets_a_live_area_and_the_last_line(started, clock):
    stream = Terminal()
    train(started(97, log_every=50, stream=stream), clock, [5])
    assert "\x1b[" in stream.getvalue()
    assert "step 5/97" in stream.getvalue()


def test_a_terminal_without_rich_gets_lines(started, clock, monkeypatch):
    def absent(name):
        raise optional_dependencies.MissingExtra(name)

    monkeypatch.setattr("experiments.harness.cli.display.optional_dependencies.load", absent)
    stream = Terminal()
    train(started(97, log_every=50, stream=stream), clock, [5])
    assert stream.getvalue() == "step 5/97  loss 5.0000  tokens/s -  padding 12.5%  left -\n"


def test_a_log_on_a_full_disk_does_not_stop_the_training(started, clock):
    train(started(97, log_every=50, stream=FullDisk()), clock, [5])


def test_the_share_of_peak_is_that_of_the_flops_since_the_last_logged_step(
    started, run, stream, clock
):
    with started(7, log_every=3, peak=40.0, every=0.0) as progress:
        for step in range(1, 8):
            progress.add(step, metrics(), positions=80, flops=100.0 * step)
            clock.seconds += 10.0
    # 200 + 300 in 20 seconds, 400 + 500 + 600 in 30, 700 in 10; 40 a second are the peak
    assert [line["mfu"] for line in run.metrics()] == [0.625, 1.25, 1.75]
    assert "tokens/s 7  62.5% mfu  padding" in stream.getvalue().splitlines()[2]


def test_without_a_peak_there_is_no_share_of_it(started, run, stream, clock):
    with started(7) as progress:
        progress.add(1, metrics(), 80, 100.0)
        clock.seconds += 10.0
        progress.add(2, metrics(), 80, 100.0)
        clock.seconds += 10.0
    assert "mfu" not in stream.getvalue()
    assert [set(line) & {"tokens_per_second", "mfu"} for line in run.metrics()] == [
        set(),
        {"tokens_per_second"},
    ]


def test_memory_in_use_is_logged_and_shown_where_devices_count_it(started, run, stream, clock):
    counts = [{"bytes_in_use": 3_000_000_000, "peak_bytes_in_use": 5_000_000_000}]
    counts.append({"bytes_in_use": 2_000_000_000, "peak_bytes_in_use": 7_000_000_000})
    devices = [SimpleNamespace(memory_stats=lambda c=c: c) for c in counts]
    memory = partial(memory_in_use, devices)
    shown = started(3, log_every=2, memory=memory, every=0.0)
    train(shown, clock, [1, 2, 3])
    assert [(x["memory"], x["memory_peak"]) for x in run.metrics()] == [(3e9, 7e9)] * 2
    assert "memory" not in stream.getvalue().splitlines()[0]
    assert "memory 3.00 GB" in stream.getvalue().splitlines()[1]
    assert memory_in_use() == {} and memory_in_use([SimpleNamespace(memory_stats=dict)]) == {}


def test_a_slow_step_is_named_with_its_cause_and_not_again_for_five_minutes(started, stream, clock):
    with started(97, log_every=50, pause_every=23) as progress:
        for step in range(1, 40):
            progress.add(step, metrics(), data_wait=9.0 if step == 31 else 0.0)
            clock.seconds += 2.0 if step != 31 else 11.0
            if step in (13, 17):  # the second one is too soon
                with progress.pace.doing("saving"):
                    clock.seconds += 8.5
            if step == 23:
                with progress.pause("evaluating"):
                    clock.seconds += 280.0
    said = [line for line in stream.getvalue().splitlines() if line.startswith("slow")]
    assert said == [
        "slow: step 13 took 10.5 s, the median of the last 11 is 2 s: saving took 8.5 s",
        "slow: step 31 took 11.0 s, the median of the last 29 is 2 s: waiting for its batch took "
        "9.0 s",
    ]


def test_what_jax_compiles_within_a_step_is_its_cause(started, stream, clock):
    with started(97, log_every=50) as progress:
        for step in range(1, 20):
            progress.add(step, metrics())
            if step == 15:
                jax.monitoring.record_event_duration_secs(
                    "/jax/core/compile/backend_compile_duration", 7.0
                )
                clock.seconds += 6.0
            clock.seconds += 2.0
    assert "the last 13 is 2 s: compiling took 7.0 s" in stream.getvalue()
    before = len(stream.getvalue())
    jax.jit(lambda x: x + 3)(jnp.ones(5))
    assert len(stream.getvalue()) == before


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ([[0.5, 0.0], [0.02, 0.4], [0.45, 0.1]], "host 1 of 3 lags: .* for its devices, 0.4 s for"),
        ([[0.0, 0.0], [0.3, 0.0]], "host 0 of 2 lags: .* not for its batches; the others waited 0"),
        ([[0.5, 0.0], [0.02, 0.4], [0.05, 0.1]], None),  # two are as late
        ([[0.5, 0.0], [0.45, 0.4], [0.55, 0.1]], None),
    ],
)
def test_the_host_that_waited_least_for_its_devices_lags(waits, said):
    sentence = lagging(np.array(waits), 0.7)
    assert re.match(said, sentence) if said else sentence == ""


class Late:
    """Batches that a host makes late."""

    def __init__(self, batches):
        self._batches = batches

    def __getattr__(self, name):
        return getattr(self._batches, name)

    def batch(self, step, rows):
        time.sleep(0.3 if jax.process_index() == 1 else 0.0)
        return self._batches.batch(step, rows)


def late_batches(config, prepared):
    return Late(prepared.batches)


@pytest.mark.slow
def test_a_host_with_late_batches_is_named_by_the_first_of_two(tmp_path):
    for name, count in (("a.txt", 83), ("b.txt", 7)):
        (tmp_path / name).write_text("sun moon rain hill sun\n" * count)
    words = f"{LANGUAGE} --strategy replicated --data.batches {__name__}:late_batches"
    words += " --training.log_every 5 --training.prefetch 0"
    first, second = finished(*begin_two(tmp_path, words))
    assert re.search(r"host 1 of 2 lags: .* 0\.3\d* s for its batch; the others", first.out)
    assert first.out.count("lags") == 1 and "lags" not in second.out


def test_the_first_step_of_each_shape_is_no_part_of_speed_and_estimate(started, run, stream, clock):
    seconds = {(2, 3): 10.0, (2, 5): 20.0}

    def step(state, batch):
        clock.seconds += seconds[batch.shape] + 500.0 * (batch.shape not in seen)
        seen.add(batch.shape)
        return state + 1, metrics()

    seen = set()
    shown = started(11, log_every=7, every=0.0)
    with shown as progress:
        announced, state = progress.announce(step), 0
        for shape in ((2, 3), (2, 3), (2, 5), (2, 5), (2, 3), (2, 5), (2, 3)):
            state, found = announced(state, jnp.zeros(shape))
            progress.add(state, found, positions=80)
    said = stream.getvalue().splitlines()
    assert sum("compiling the step" in line for line in said) == 2
    # steps 2, 4, 5, 6 and 7 take 10, 20, 10, 20 and 10 seconds, and 4 steps of 14 are left
    assert run.metrics()[0]["tokens_per_second"] == 5 * 70 / 70.0
    assert said[-1].endswith("left 0:00:56")


def test_the_estimate_counts_the_pauses_to_come_and_the_speed_does_not(started, run, stream, clock):
    with started(13, log_every=5, pause_every=5, every=0.0) as progress:
        for step in range(1, 7):
            progress.add(step, metrics(), positions=80)
            clock.seconds += 10.0
            if step == 5:
                with progress.pause("translating 3 sentences"):
                    clock.seconds += 100.0
    # 7 steps of 10 seconds, one more pause, and two at the end
    assert stream.getvalue().splitlines()[-1].endswith("left 0:06:10")
    assert run.metrics()[0]["tokens_per_second"] == 7.0
    assert "translating 3 sentences: " in stream.getvalue()
