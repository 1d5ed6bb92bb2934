"""The numbers of each step that are logged and shown."""

import io
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.harness.training.pace import lagging
from experiments.harness.training.progress import Progress
from experiments.harness.training.step_numbers import memory_in_use
from jaxformer.errors import Diverged
from tests.experiments.test_display import FullDisk
from tests.experiments.test_distributed import begin_two
from tests.experiments.test_training_config import LANGUAGE
from tests.two_processes import finished

COMPILED = "/jax/core/compile/backend_compile_duration"


class Clock:
    seconds = 100.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lines():
    """What was logged."""
    return []


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def started(lines, stream, clock):
    """Progress of so many steps, all logged unless `log_every` says otherwise."""

    def start(total, **options):
        def log(step, numbers):
            lines.append({"step": step, **numbers})

        return Progress(total, log, **{"log_every": 1, "stream": stream, "clock": clock} | options)

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


def test_what_is_logged_is_of_its_step_and_speeds_are_those_since_the_last_one(
    started, lines, stream, clock
):
    with started(7, log_every=3, peak=40.0) as progress:
        for step in range(1, 8):
            progress.add(step, metrics(loss=step), positions=80, flops=100.0 * step)
            clock.seconds += 10.0 if step < 4 else 5.0
    # 70 tokens every 10 seconds, later every 5, of which 10 of 80 positions are padding;
    # 200 + 300 FLOPs in 20 seconds, 400 + 500 + 600 in 15, 700 in 5; 40 a second are the peak
    assert lines == [
        {"step": step, "loss": step, "grad_norm": 0.5, "padding": 0.125, "data_wait": 0.0} | speed
        for step, speed in (
            (3, {"tokens_per_second": 7.0, "mfu": 0.625}),
            (6, {"tokens_per_second": 14.0, "mfu": 2.5}),
            (7, {"tokens_per_second": 14.0, "mfu": 3.5}),
        )
    ]
    first, *_, ended = stream.getvalue().splitlines()
    assert first == "step 3/7  loss 3.0000  left 0:00:40  tokens/s 7  62.5% mfu"
    assert re.fullmatch(r"training: \d+\.\d s", ended)


@pytest.mark.parametrize(("runs_ahead", "logged"), [(True, [0, 0, 1, 2]), (False, [0, 1, 2, 3])])
def test_a_step_begins_before_or_after_the_last_one_is_logged(started, lines, runs_ahead, logged):
    seen = []

    def step(state, batch):
        seen.append(len(lines))
        return state, metrics()

    with started(4, log_every=1, runs_ahead=runs_ahead) as progress:
        announced = progress.announce(step)
        for number in range(1, 5):
            _, numbers = announced(None, jnp.ones(3))
            progress.add(number, numbers)
    assert seen == logged


def test_rates_are_those_of_updates_and_sums_those_per_token(started, lines):
    with started(5, learning_rates=np.arange(5.0)) as progress:
        for step, skipped in enumerate((0, 0, 1, 1, 1), start=1):
            given = metrics() | {"skipped": jnp.int32(skipped), "correct": jnp.int32(21)}
            progress.add(step, given, positions=80)
    assert [line["learning_rate"] for line in lines] == [0.0, 1.0, 1.0, 2.0, 3.0]
    assert all(line["correct"] == pytest.approx(0.3, rel=1e-6) for line in lines)
    assert not any({"tokens_per_second", "mfu"} & set(line) for line in lines), "the first step"


def test_a_loss_that_is_not_finite_is_left_out_and_too_many_of_them_end_the_training(
    started, lines
):
    said = "10 steps in a row, the last of them step 12 "
    with pytest.raises(Diverged, match=said), started(97) as progress:
        for step, loss in ((1, 2.0), (2, float("nan")), (3, float("inf"))):
            progress.add(step, metrics(loss=loss, in_a_row=step - 1), 80)
        progress.add(12, metrics(loss=float("nan"), in_a_row=10), 80)
        progress.settle()
    assert [line.get("loss") for line in lines] == [2.0, None, None]
    assert [line.get("skipped") for line in lines] == [None, 1.0, 2.0]
    assert "consecutive_skips" not in lines[2]


def test_a_step_is_fetched_when_the_next_is_added_or_before_a_save(started, lines):
    with started(97) as progress:
        progress.add(1, metrics(), 80)
        assert lines == []
        progress.add(2, metrics(), 80)
        assert [line["step"] for line in lines] == [1]
        progress.settle()
        progress.settle()
        assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(("error", "steps"), [(KeyboardInterrupt, [1, 2]), (ValueError, [1])])
def test_a_stop_on_request_logs_the_last_step_and_a_bug_does_not(started, lines, error, steps):
    with pytest.raises(error), started(97) as progress:
        progress.add(1, metrics(), 80)
        progress.add(2, metrics(), 80)
        raise error
    assert [line["step"] for line in lines] == steps


def test_an_interval_of_zero_logs_the_last_step_also_where_it_is_padding_or_the_disk_full(
    started, lines
):
    with started(2, log_every=0, stream=FullDisk()) as progress:
        progress.add(1, metrics())
        progress.add(2, metrics(tokens=0), 80)
    (line,) = lines
    assert (line["step"], line["loss"], line["padding"]) == (2, 0.0, 1.0)


def test_the_time_left_counts_pauses_once_one_was_timed_and_the_speed_leaves_them_out(
    started, lines, stream, clock
):
    with started(13, pause_every=5) as progress:
        for step in range(1, 7):
            progress.add(step, metrics(), positions=80)
            clock.seconds += 10.0
            if step == 5:
                with progress.pause("translating 3 sentences"):
                    clock.seconds += 130.0
                    jax.monitoring.record_event_duration_secs(COMPILED, 30.0)
    said = stream.getvalue()
    assert "step 4/13  loss 2.0000  left 0:01:30 + evaluations  tokens/s 7\n" in said
    assert "translating 3 sentences: " in said
    # 7 steps of 10 seconds, one more pause, and two at the end, without its 30 s of compiling
    assert "step 6/13  loss 2.0000  left 0:06:10  tokens/s 7\n" in said
    assert lines[5]["tokens_per_second"] == 7.0


def test_the_first_step_of_each_shape_is_no_part_of_speed_and_estimate(
    started, lines, stream, clock
):
    seconds = {(2, 3): 10.0, (2, 5): 20.0}

    def step(state, batch):
        clock.seconds += seconds[batch.shape] + 500.0 * (batch.shape not in seen)
        seen.add(batch.shape)
        return state + 1, metrics()

    seen = set()
    with started(11, log_every=7) as progress:
        announced, state = progress.announce(step), 0
        for shape in ((2, 3), (2, 3), (2, 5), (2, 5), (2, 3), (2, 5), (2, 3)):
            state, found = announced(state, jnp.zeros(shape))
            progress.add(state, found, positions=80)
    assert stream.getvalue().count("compiling the step") == 2
    # steps 2, 4, 5, 6 and 7 take 10, 20, 10, 20 and 10 seconds, and 4 steps of 14 are left
    assert lines[0]["tokens_per_second"] == 5 * 70 / 70.0
    assert "step 7/11  loss 2.0000  left 0:00:56" in stream.getvalue()


def test_memory_in_use_is_logged_and_shown_where_devices_count_it(started, lines, stream):
    counts = [{"bytes_in_use": 3_000_000_000, "peak_bytes_in_use": 5_000_000_000}]
    counts.append({"bytes_in_use": 2_000_000_000, "peak_bytes_in_use": 7_000_000_000})
    devices = [SimpleNamespace(memory_stats=lambda c=c: c) for c in counts]
    with started(1, memory=lambda: memory_in_use(devices)) as progress:
        progress.add(1, metrics())
    assert (lines[0]["memory"], lines[0]["memory_peak"]) == (3e9, 7e9)
    assert "  memory 3.00 GB\n" in stream.getvalue()
    assert memory_in_use() == {} and memory_in_use([SimpleNamespace(memory_stats=dict)]) == {}


def test_a_slow_step_is_named_with_its_cause_and_not_again_for_five_minutes(started, stream, clock):
    with started(97, log_every=50, pause_every=23) as progress:
        for step in range(1, 40):
            progress.add(step, metrics(), data_wait=9.0 if step == 31 else 0.0)
            clock.seconds += 2.0 if step != 31 else 11.0
            if step in (13, 17):  # the second one is too soon
                with progress.held_up("saving"):
                    clock.seconds += 8.5
            if step == 35:
                clock.seconds += 300.0
                jax.monitoring.record_event_duration_secs(COMPILED, 297.0)
            if step == 23:
                with progress.pause("evaluating"):
                    clock.seconds += 280.0
    assert [line for line in stream.getvalue().splitlines() if line.startswith("slow")] == [
        "slow: step 13 took 10.5 s, the median is 2 s: saving took 8.5 s",
        "slow: step 31 took 11.0 s, the median is 2 s: waiting for its batch took 9.0 s",
        "slow: step 35 took 302.0 s, the median is 2 s: compiling took 297.0 s",
    ]


def test_a_step_that_waits_for_a_logger_says_so(stream, clock):
    def slow_log(step, numbers):
        clock.seconds += 7.5

    with Progress(31, slow_log, log_every=20, stream=stream, clock=clock) as progress:
        for step in range(1, 31):
            progress.add(step, metrics())
            clock.seconds += 2.0
    (line,) = (x for x in stream.getvalue().splitlines() if x.startswith("slow"))
    assert line == "slow: step 21 took 9.5 s, the median is 2 s: logging took 7.5 s"


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
