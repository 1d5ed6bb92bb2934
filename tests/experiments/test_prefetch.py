"""Batches come in order, at most so many ahead; errors reach the step; the thread ends."""

import threading
import time
from contextlib import closing

import pytest

from experiments.harness.training.prefetching import Prefetched
from jaxformer.errors import DataError


def prefetched(*arguments):
    return closing(Prefetched(*arguments))


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_batches_are_those_of_each_number_in_order(depth):
    with prefetched(lambda number: number * number, 5, 18, depth) as batches:
        assert [batches.get() for _ in range(5, 18)] == [number**2 for number in range(5, 18)]
    assert not threads()


def test_at_most_depth_batches_are_made_ahead():
    made = []
    with prefetched(made.append, 0, 97, 3):
        deadline = time.monotonic() + 5.0
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)  # a thread without a bound would have made all 97 by now
        assert made == [0, 1, 2]
    assert not threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_reaches_the_one_who_asks_for_that_batch(depth):
    def make(number):
        if number == 7:
            raise DataError("the file is damaged")
        return number

    with prefetched(make, 5, 11, depth) as batches:
        assert [batches.get(), batches.get()] == [5, 6]
        with pytest.raises(DataError, match="the file is damaged"):
            batches.get()
    assert not threads()


def test_the_time_waited_is_that_of_the_last_batch_and_the_thread_ends_with_an_error():
    may_make = threading.Event()
    with pytest.raises(ZeroDivisionError):
        with prefetched(lambda number: may_make.wait(5.0), 0, 11, 2) as batches:
            threading.Timer(0.05, may_make.set).start()
            batches.get()
            assert batches.waited > 0.02
            while batches.waited > 0.02:  # the second may still have been made
                batches.get()
            raise ZeroDivisionError
    assert not threads()
