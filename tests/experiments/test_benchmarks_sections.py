"""Each section is measured in a process of its own and within its time; failures are told."""

import multiprocessing
import os
import time

import pytest

from experiments.benchmarks.gpu import sections
from experiments.benchmarks.gpu.sections import Section


def whole():
    yield "process", os.getpid()
    yield "ms", 2.5


def broken():
    yield "ms", 1.5
    raise ValueError("7 is odd\nand more")


def dying():
    yield "ms", 3.5
    os._exit(7)


def hanging():
    yield "ms", 4.5
    time.sleep(600)


def test_the_first_attempt_that_comes_to_its_end_counts():
    found = sections.run(Section("a", 1.0, {"first": broken, "second": whole, "third": dying}), 99)
    assert found.pop("process") not in (os.getpid(), None) and found.pop("seconds") >= 0
    assert found == {
        "attempt": "second",
        "ms": 2.5,
        "failed_before": {"first": "ValueError: 7 is odd"},
    }


def test_a_section_none_of_whose_attempts_ends_says_why_of_each():
    found = sections.run(Section("a", 1.0, {"first": broken, "second": dying}), 99)
    assert (found["attempt"], found["ms"]) == ("second", 3.5)
    assert found["failed"] == "first: ValueError: 7 is odd; second: its process ended with code 7"
    assert "failed_before" not in found


def test_a_section_that_takes_too_long_is_killed():
    begin = time.monotonic()
    found = sections.run(Section("a", 1.0, {"slow": hanging, "late": whole}), 3)
    assert 3 <= time.monotonic() - begin < 30 and 3 <= found["seconds"] < 30
    assert found["failed"] == "slow: took longer than 3 s; late: no time was left"
    assert "process" not in found and not multiprocessing.active_children()


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_what_a_section_leaves_of_its_time_the_later_ones_share(monkeypatch):
    clock, given, saved = FakeClock(), [], []
    monkeypatch.setattr(sections.time, "monotonic", clock)
    durations = iter([5.0, 25.0, 60.0, 1.0])

    def run(section, seconds):
        given.append((section.name, seconds))
        clock.now += next(durations)
        return {"ms": section.weight}

    monkeypatch.setattr(sections, "run", run)
    wanted = [Section(name, weight, {}) for name, weight in zip("abcd", (1, 1, 1, 1), strict=True)]
    found = sections.run_all(wanted, 80.0, lambda entries: saved.append(list(entries)))
    assert given == [("a", 20.0), ("b", 25.0), ("c", 25.0), ("d", 0.0)]
    assert saved == [["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    assert found == {name: {"ms": 1} for name in "abcd"}


@pytest.mark.parametrize(("weights", "share"), [((3, 1), 60.0), ((1, 3), 20.0)])
def test_a_section_has_the_share_of_its_weight(monkeypatch, weights, share):
    given = []
    monkeypatch.setattr(sections, "run", lambda _, seconds: given.append(seconds) or {})
    sections.run_all([Section(str(w), w, {}) for w in weights], 80.0, lambda entries: None)
    assert given == [pytest.approx(share, abs=1.0), pytest.approx(80.0, abs=1.0)]
