"""Programs at the same time: what is promised of those that decode in parts."""

import dataclasses
import os
import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxformer.runtime import concurrency, concurrently


def test_results_come_in_order_whatever_ends_first():
    last = threading.Event()

    def wait():
        assert last.wait(10)
        return "first"

    def end():
        last.set()
        return "second"

    assert list(concurrently([wait, end, lambda: "third"], 2)) == ["first", "second", "third"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_as_many_run_at_a_time_as_asked_for_and_no_more(count):
    running, most, lock = [0], [0], threading.Lock()
    together = threading.Barrier(count)

    def run():
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(10)  # breaks unless `count` of them come
        time.sleep(0.01)
        with lock:
            running[0] -= 1

    assert len(list(concurrently([run] * 6, count))) == 6
    assert most == [count]


def test_runs_are_prepared_in_the_callers_thread_while_others_run():
    prepared, begun = [], threading.Event()

    def runs():
        for number in range(5):
            prepared.append(threading.get_ident())
            if number == 1:
                assert begun.wait(10), "the first runs before the second is prepared"
            yield partial(run, number)

    def run(number):
        begun.set()
        return number, threading.get_ident()

    here = threading.get_ident()
    numbers, threads = zip(*concurrently(runs(), 2), strict=True)
    assert numbers == (0, 1, 2, 3, 4)
    assert set(prepared) == {here} and here not in threads


def test_an_error_is_the_callers_and_nothing_begins_after_it():
    begun, threads = [], threading.active_count()

    def run(number):
        begun.append(number)
        if number == 1:
            raise ZeroDivisionError("in the second")
        return number

    found = concurrently((partial(run, number) for number in range(97)), 1)
    assert next(found) == 0
    with pytest.raises(ZeroDivisionError, match="in the second"):
        next(found)
    assert max(begun) < 4
    assert threading.active_count() == threads


def test_closing_waits_for_what_runs_and_begins_nothing_more():
    begun, threads = [], threading.active_count()

    def run(number):
        time.sleep(0.01)
        begun.append(number)

    found = concurrently((partial(run, number) for number in range(97)), 2)
    next(found)
    found.close()
    assert threading.active_count() == threads
    assert len(begun) < 7


def test_two_programs_at_a_time_on_one_cpu_of_several_processors_else_one(monkeypatch):
    weights = {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert concurrency(weights) == 2
    assert concurrency(jax.device_get(weights)) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5}, raising=False)
    assert concurrency(weights) == 1
    on_a_gpu = [dataclasses.make_dataclass("Device", ["platform"], frozen=True)("gpu")]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(jax, "local_devices", lambda: on_a_gpu)
    assert concurrency(jax.device_get(weights)) == 1
