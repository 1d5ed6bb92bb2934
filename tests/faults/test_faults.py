"""The short form of the injected faults, in a process that forks before it touches a device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import files, kills, peers, soak
from tests.faults.__main__ import FAULTS

pytestmark = pytest.mark.long

TIMES = ("seconds", "processor_seconds")
ROOT = Path(__file__).parents[2]


def test_every_short_injection_is_survived_and_nothing_is_silently_wrong(tmp_path):
    out = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tests.faults", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert [row["fault"] for row in rows] == [fault.name for fault in FAULTS if fault.short]
    assert all(set(row) == {"fault", "tries", "survived", "silent", *TIMES} for row in rows)
    assert all(row["survived"] == row["tries"] > 0 and row["silent"] == 0 for row in rows)
    # the lines printed say the same
    lines = [line for line in done.stdout.splitlines() if " of " in line]
    assert len(lines) == len(rows)


@pytest.mark.parametrize(
    ("began", "said"),
    [
        ({"found": 7}, "survived"),
        ({"found": 6}, "step 6 was found, but 7 was committed"),
        ({"found": 7, "wrong": [5]}, "silent: steps [5] are not what was saved"),
        ({"found": 7, "skipped": ["8"]}, "a whole step was skipped: ['8']"),
    ],
)
def test_a_start_after_a_kill_must_find_at_least_what_was_committed(began, said):
    assert kills.judge({"wrong": [], "skipped": []} | began, committed=7) == said


def sampled(**last: int) -> list[dict]:
    """Ten samples of a training of 100 steps, of which the last shows other numbers."""
    usual = {"memory": 700_000_000, "files": 21, "threads": 37}
    samples = [{"step": step, **usual} for step in range(5, 100, 10)]
    return [*samples[:-1], samples[-1] | last]


@pytest.mark.parametrize(
    ("last", "compiled", "said"),
    [
        ({}, {"step a": 1, "step b": 1, "decode": 1}, "survived"),
        ({"memory": 710_000_000}, {"step a": 1, "step b": 1}, "memory: 700,000,000 grew to 710"),
        ({"files": 22}, {"step a": 1, "step b": 1}, "files: 21 grew to 22"),
        ({"threads": 42}, {"step a": 1, "step b": 1}, "threads: 37 grew to 42"),
        ({}, {"step a": 2, "step b": 1}, "more than once: {'step a': 2}"),
        ({}, {"step a": 1}, "1 steps compiled"),
    ],
)
def test_a_soak_may_neither_grow_nor_compile_again(last, compiled, said):
    outcomes = soak.judge(sampled(**last), compiled, 100)
    assert len(outcomes) == 4
    wrong = [outcome for outcome in outcomes if outcome != "survived"]
    assert len(wrong) == (said != "survived")
    assert said in (wrong or ["survived"])[0]


ERROR = "error: runs/translation/tiny/env.json is not JSON\n"


@pytest.mark.parametrize(
    ("code", "said", "found", "outcome"),
    [
        (2, ERROR, [], "survived"),
        (1, ERROR, [], "ended with 1: "),
        (2, "error: not JSON\n", [], "ended with 2: "),
        (2, f"Traceback (most recent call last)\n{ERROR}", [], "ended with 2: "),
        (2, "", [], "ended with 2: "),
        (0, "", [{"ids": [3], "env.json": 6}], "survived"),
        (0, "", [{"ids": [4], "env.json": 5}], "silent: other ids"),
    ],
)
def test_a_damaged_small_file_must_be_refused_in_a_sentence_or_change_nothing(
    code, said, found, outcome
):
    before = [{"ids": [3], "env.json": 5}]
    assert files.judge("env.json", code, said, found, before).startswith(outcome)


@pytest.mark.parametrize(
    ("code", "seconds", "said", "outcome"),
    [
        (-6, 14.9, "another task died", "survived"),
        (1, 0.5, "error: another process has died, or its connection has: Gloo", "survived"),
        (-6, 15.1, "another task died", "took 15.1 s to end"),
        (0, 1.0, "another task died", "silent: ended with 0"),
        (-6, 1.0, "Aborted", "ended with -6 without the reason"),
    ],
)
def test_who_survives_another_process_must_end_in_time_and_say_why(code, seconds, said, outcome):
    assert peers.judge(code, seconds, said).startswith(outcome)
