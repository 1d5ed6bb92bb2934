"""Timing in turn, each case in a process of its own; one that fails does not take the others."""

import itertools
import os
import time
from functools import partial

import pytest

from experiments.benchmarks.timing import (
    Case,
    CaseFailed,
    Timing,
    TimingConfig,
    _guarded,
    measure_cases,
    run_tables,
    summarise,
)
from jaxformer.errors import ConfigError


def test_a_summary_is_what_can_be_computed_by_hand():
    summary = summarise([3.0, 1.0, 2.0], {"tokens": 7})
    assert summary == Timing(median=2.0, least=1.0, spread=0.5, metadata={"tokens": 7})
    assert summarise([3.0], {}) == Timing(3.0, 3.0, 0.0, {})  # one round


def noting(path, name):
    """A case that adds its name and its process to a file."""

    def run():
        with path.open("a") as file:
            file.write(f"{name} {os.getpid()}\n")

    return Case(run, {"name": name})


def refusing():
    raise ConfigError("size=7 is odd")


def dying_later():
    calls = itertools.count()
    return Case(lambda: next(calls) and os._exit(9), {})


def hanging():
    time.sleep(600)


def test_an_error_of_a_case_is_its_first_line():
    with pytest.raises(CaseFailed, match="'7 is odd'$"):
        _guarded(int, "7 is odd")


@pytest.mark.slow
def test_cases_are_measured_in_turn_each_in_its_process_and_failures_are_told(tmp_path):
    path = tmp_path / "runs.txt"
    makes = {name: partial(noting, path, name) for name in ("jaxformer", "peer")}
    makes |= {"refusing": refusing, "dying": dying_later}
    found = measure_cases(makes, TimingConfig(rounds=2, repetitions=3), peers=("peer", "absent"))
    assert list(found.measured) == ["jaxformer", "peer"]
    assert found.measured["peer"].ratio == 1.0 and found.measured["jaxformer"].ratio > 0
    assert found.measured["peer"].metadata == {"name": "peer"}
    assert found.missing == {"refusing": "size=7 is odd", "dying": "its process has ended"}
    names, processes = zip(*map(str.split, path.read_text().splitlines()), strict=True)
    one, other = 3 * ["jaxformer"], 3 * ["peer"]
    assert list(names) == ["jaxformer", "peer", *one, *other, *one, *other]
    assert len({*processes, str(os.getpid())}) == 3


@pytest.mark.slow
def test_a_case_that_takes_too_long_is_given_up_and_the_table_says_so(tmp_path, capsys):
    makes = {"quick": partial(noting, tmp_path / "runs.txt", "quick"), "hanging": hanging}
    timing = TimingConfig(rounds=1, case_seconds=40.0, interleaved=False, runs=str(tmp_path))
    found = run_tables(timing, {"a table": makes})
    assert found["a table"].missing == {"hanging": "took longer than case_seconds=40"}
    assert "not measured: hanging: took longer" in capsys.readouterr().out
    assert "took longer" in (tmp_path / "benchmarks" / "benchmark.json").read_text()
