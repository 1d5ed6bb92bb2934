"""What is measured runs in a process of its own, and one that fails does not take the others."""

import itertools
import os
from functools import partial

import pytest

from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.subprocesses import Subject, compare
from jaxformer.errors import ConfigError, MissingExtra


def working(number):
    return Subject(lambda: None, {"number": number, "process": os.getpid()})


def refusing():
    raise ConfigError("size=7 is odd")


def lacking():
    raise MissingExtra("torch is needed here")


def dying():
    os._exit(7)


def dying_later():
    calls = itertools.count()
    return Subject(lambda: next(calls) and os._exit(9), {})


def test_each_is_made_in_a_process_of_its_own_and_what_cannot_be_made_is_told():
    makes = {"ours": partial(working, 3), "peer": partial(working, 5)}
    makes |= {"refusing": refusing, "lacking": lacking, "dying": dying}
    found = compare(makes, TimingConfig(rounds=2, repetitions=3), peers=("peer",))
    assert list(found.measured) == ["ours", "peer"] and found.measured["peer"].ratio == 1.0
    assert [found.facts[name]["number"] for name in ("ours", "peer")] == [3, 5]
    processes = {os.getpid(), *(facts["process"] for facts in found.facts.values())}
    assert len(processes) == 3
    assert found.missing == {
        "refusing": "size=7 is odd",
        "lacking": "torch is needed here",
        "dying": "its process ended with code 7",
    }


def test_a_process_that_ends_while_it_is_measured_ends_the_comparison():
    with pytest.raises(RuntimeError, match="its process ended with code 9"):
        compare({"ours": dying_later}, TimingConfig(rounds=1, warm_up=1), peers=())
