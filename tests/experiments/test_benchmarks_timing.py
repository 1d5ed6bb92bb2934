"""Timing in turn, each case in a process of its own; one that fails does not take the others."""

import itertools
import json
import multiprocessing
import os
import time
from dataclasses import dataclass
from functools import partial

import pytest

from experiments.benchmarks.timing import (
    Case,
    Comparison,
    Summary,
    TimingConfig,
    compare,
    measure_in_turn,
    summarise,
)
from jaxformer.errors import ConfigError


def test_all_are_measured_in_every_round_one_after_the_other():
    calls = []

    def measure_as(name):
        def measure(count):
            calls.append((name, count))
            return float(len(calls))

        return measure

    timing = TimingConfig(rounds=2, repetitions=7)
    seconds = measure_in_turn({name: measure_as(name) for name in "abc"}, timing)
    assert calls == [(name, 7) for name in "abcabc"]
    assert seconds["b"] == [2.0, 5.0]


def test_a_summary_is_what_can_be_computed_by_hand():
    seconds = {"jaxformer": [3.0, 1.0, 2.0], "slow": [8.0] * 3, "fast": [4.0] * 3}
    summaries = summarise(seconds, ("slow", "fast", "absent"))
    assert summaries["jaxformer"] == Summary(median=2.0, least=1.0, spread=0.5, ratio=0.5)
    assert summaries["slow"].ratio == 2.0 and summaries["fast"].ratio == 1.0
    alone = summarise({"jaxformer": [3.0]}, ("fast",))  # no peer, and one round
    assert alone["jaxformer"] == Summary(median=3.0, least=3.0, spread=0.0, ratio=None)


def working(number):
    return Case(lambda: None, {"number": number, "process": os.getpid()})


def refusing():
    raise ConfigError("size=7 is odd")


def broken():
    raise ValueError("7 is odd\nand more")


def dying():
    os._exit(7)


def dying_later():
    calls = itertools.count()
    return Case(lambda: next(calls) and os._exit(9), {})


@pytest.mark.long
def test_each_is_made_in_a_process_of_its_own_and_what_cannot_be_made_is_told():
    makes = {"jaxformer": partial(working, 3), "peer": partial(working, 5)}
    makes |= {"refusing": refusing, "dying": dying}
    found = compare(makes, TimingConfig(rounds=2, repetitions=3), peers=("peer",))
    assert list(found.measured) == ["jaxformer", "peer"] and found.measured["peer"].ratio == 1.0
    assert [found.metadata[name]["number"] for name in ("jaxformer", "peer")] == [3, 5]
    processes = {os.getpid(), *(one["process"] for one in found.metadata.values())}
    assert len(processes) == 3
    assert found.missing == {
        "refusing": "size=7 is odd",
        "dying": "its process ended with code 7",
    }


@pytest.mark.long
def test_a_process_that_ends_while_it_is_measured_ends_the_comparison():
    with pytest.raises(RuntimeError, match="its process ended with code 9"):
        compare({"jaxformer": dying_later}, TimingConfig(rounds=1, warm_up=1), peers=())


def hanging():
    time.sleep(600)


@pytest.mark.long
def test_cases_that_do_not_share_a_device_are_measured_one_after_the_other():
    makes = {"later": dying_later, "broken": broken, "last": partial(working, 5)}
    alone = TimingConfig(rounds=1, interleaved=False)
    found = compare(makes, alone, peers=("last",))
    assert list(found.measured) == ["last"] and found.measured["last"].ratio == 1.0
    assert found.missing == {
        "later": "its process ended with code 9",
        "broken": "ValueError: 7 is odd",
    }


@pytest.mark.long
def test_a_case_that_takes_too_long_is_given_up():
    begin = time.monotonic()
    found = compare({"slow": hanging}, TimingConfig(case_seconds=1), peers=())
    assert found.missing == {"slow": "took longer than case_seconds=1"}
    assert 1 <= time.monotonic() - begin < 30 and not multiprocessing.active_children()


@dataclass(frozen=True)
class Options(TimingConfig):
    name: str = "mine"


def test_what_is_printed_is_written_after_every_table(tmp_path, capsys, monkeypatch):
    from experiments.benchmarks import report  # the processes above do without JAX

    path, seen = tmp_path / "benchmarks" / "mine.json", []

    def compare(cases, options, peers):
        seen.append(list(json.loads(path.read_text())["comparisons"]) if path.exists() else [])
        return Comparison({name: Summary(1.0, 1.0, 0.0, None) for name in cases}, cases, {})

    monkeypatch.setattr(report, "compare", compare)
    tables = {"first": {"jaxformer": {}}, "second": {"jaxformer": {"tokens": 3}}}
    comparisons = report.run_tables(Options(runs=str(tmp_path)), tables)
    assert seen == [[], ["first"]]
    written, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert list(written["comparisons"]) == ["first", "second"]
    assert written["options"]["name"] == "mine" and written["options"]["runs"] == str(tmp_path)
    assert f"cores {written['environment']['cores']}" in printed.splitlines()[0]
    assert report.table(comparisons["second"]) in printed
