"""What is measured runs in a process of its own, and one that fails does not take the others."""

import itertools
import multiprocessing
import os
import time
from functools import partial

import pytest

from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.subprocesses import Case, compare
from jaxformer.errors import ConfigError, MissingExtra


def working(number):
    return Case(lambda: None, {"number": number, "process": os.getpid()})


def refusing():
    raise ConfigError("size=7 is odd")


def lacking():
    raise MissingExtra("torch is needed here")


def broken():
    raise ValueError("7 is odd\nand more")


def dying():
    os._exit(7)


def dying_later():
    calls = itertools.count()
    return Case(lambda: next(calls) and os._exit(9), {})


def test_each_is_made_in_a_process_of_its_own_and_what_cannot_be_made_is_told():
    makes = {"jaxformer": partial(working, 3), "peer": partial(working, 5)}
    makes |= {"refusing": refusing, "lacking": lacking, "dying": dying, "broken": broken}
    found = compare(makes, TimingConfig(rounds=2, repetitions=3), peers=("peer",))
    assert list(found.measured) == ["jaxformer", "peer"] and found.measured["peer"].ratio == 1.0
    assert [found.metadata[name]["number"] for name in ("jaxformer", "peer")] == [3, 5]
    processes = {os.getpid(), *(one["process"] for one in found.metadata.values())}
    assert len(processes) == 3
    assert found.missing == {
        "refusing": "size=7 is odd",
        "lacking": "torch is needed here",
        "dying": "its process ended with code 7",
        "broken": "ValueError: 7 is odd",
    }


def test_a_process_that_ends_while_it_is_measured_ends_the_comparison():
    with pytest.raises(RuntimeError, match="its process ended with code 9"):
        compare({"jaxformer": dying_later}, TimingConfig(rounds=1, warm_up=1), peers=())


def hanging():
    time.sleep(600)


def test_cases_that_do_not_share_a_device_are_measured_one_after_the_other():
    makes = {"first": partial(working, 3), "later": dying_later, "last": partial(working, 5)}
    alone = TimingConfig(rounds=1, interleaved=False)
    found = compare(makes, alone, peers=("last",))
    assert list(found.measured) == ["first", "last"] and found.measured["last"].ratio == 1.0
    assert found.missing == {"later": "its process ended with code 9"}


def test_a_case_that_takes_too_long_is_given_up():
    begin = time.monotonic()
    found = compare({"slow": hanging}, TimingConfig(case_seconds=3), peers=())
    assert found.missing == {"slow": "took longer than case_seconds=3"}
    assert 3 <= time.monotonic() - begin < 30 and not multiprocessing.active_children()
