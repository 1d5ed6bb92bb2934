"""The short form of the injected faults, in a process that forks before it touches a device."""

import json

import pytest

from tests.faults import files, kills, soak, stops
from tests.faults.__main__ import FAULTS
from tests.two_processes import finished, start

pytestmark = pytest.mark.long

TIMES = ("seconds", "processor_seconds")


def test_every_short_injection_is_survived_and_nothing_is_silently_wrong(tmp_path):
    out = tmp_path / "faults.json"
    (done,) = finished(start("-m", "tests.faults", "--out", out), timeout=300)
    rows = json.loads(out.read_text())
    assert [row["fault"] for row in rows] == [
        fault.name for fault in FAULTS if fault.short is not None
    ]
    assert all(set(row) == {"fault", "tries", "survived", "silent", *TIMES} for row in rows)
    assert all(row["survived"] == row["tries"] > 0 and row["silent"] == 0 for row in rows)
    # the lines printed say the same
    lines = [line for line in done.out.splitlines() if " of " in line]
    assert len(lines) == len(rows)


START = {"wrong": [], "skipped": [], "found": 7}
ONCE = {"step a": 1, "step b": 1, "decode": 1}
ERROR = "error: runs/translation/tiny/env.json is not JSON\n"
SAME = {"ids": [3], "env.json": 5}


def sampled(compiled: dict[str, int], **last: int) -> str:
    """What is wrong with a training of 100 steps, of which the last of ten samples differs."""
    usual = {"memory": 700_000_000, "files": 21, "threads": 37}
    samples = [{"step": step, **usual} for step in range(5, 100, 10)]
    outcomes = soak.judge([*samples[:-1], samples[-1] | last], compiled, 100)
    assert len(outcomes) == 4
    wrong = [outcome for outcome in outcomes if outcome != "survived"]
    assert len(wrong) < 2
    return (wrong or ["survived"])[0]


def used(code: int, said: str, *found: dict) -> str:
    """The outcome of a use of a run whose env.json was damaged."""
    return files.judge("env.json", code, said, list(found), [SAME])


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (kills.judge(START, 7), "survived"),
        (kills.judge(START, 8), "step 7 was found, but 8 was committed"),
        (kills.judge(START | {"wrong": [5]}, 7), "silent: steps [5] are not what was saved"),
        (kills.judge(START | {"skipped": ["8"]}, 7), "a whole step was skipped: ['8']"),
        (sampled(ONCE), "survived"),
        (sampled(ONCE, memory=710_000_000), "memory: 700,000,000 grew to 710"),
        (sampled(ONCE, files=22), "files: 21 grew to 22"),
        (sampled(ONCE, threads=42), "threads: 37 grew to 42"),
        (sampled(ONCE | {"step a": 2}), "2 steps compiled, more than once: {'step a': 2}"),
        (sampled({"step a": 1}), "1 steps compiled"),
        (used(2, ERROR), "survived"),
        (used(1, ERROR), "ended with 1: "),
        (used(2, "error: not JSON\n"), "ended with 2: "),
        (used(2, f"Traceback (most recent call last)\n{ERROR}"), "ended with 2: "),
        (used(2, ""), "ended with 2: "),
        (used(0, "", SAME | {"env.json": 6}), "survived"),
        (used(0, "", SAME | {"ids": [4]}), "silent: other ids"),
        (stops.judge(-6, 14.9, "another task died"), "survived"),
        (stops.judge(1, 0.5, "error: another process has died, or its connection"), "survived"),
        (stops.judge(-6, 15.1, "another task died"), "took 15.1 s to end"),
        (stops.judge(0, 1.0, "another task died"), "silent: ended with 0"),
        (stops.judge(-6, 1.0, "Aborted"), "ended with -6 without the reason"),
    ],
)
def test_what_is_lost_wrong_late_or_unsaid_is_not_survived(outcome, expected):
    assert outcome.startswith(expected)
