"""Hearing of each token from a compiled program that is still running."""

import itertools
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

Hear = Callable[[np.ndarray], np.ndarray]
"""hear(tokens [B]) -> stop [B] bool, called on the host after every token."""

# A program is compiled once for all who will listen: each run carries its listener's number.
_LISTENERS: dict[int, Hear] = {}
_NUMBERS = itertools.count()


def watch(number: jax.Array, tokens: jax.Array) -> jax.Array:
    """Inside a program: tells the listener `number` of `tokens` [B]; which to stop, [B] bool."""
    # Not `ordered`: the answer decides whether there is a next token, and so orders the calls.
    return io_callback(_tell, jax.ShapeDtypeStruct(tokens.shape, bool), number, tokens)


def run_and_hear(
    program: Callable[[int], Any], hear: Callable[[np.ndarray], tuple[list[Any], np.ndarray]]
) -> Generator[Any, None, Any]:
    """Yields what `hear` makes of the tokens while `program` runs; returns what that returns.

    `program(number)` runs in a thread, with `watch(number, ...)` inside; `hear(tokens [B])` gives
    a list of things to yield and stop [B]. When the generator is closed, or `hear` or the program
    fails, the program is stopped after its next token and the thread is over.
    """
    heard, closed, failed = SimpleQueue(), threading.Event(), []

    def listener(tokens):
        # An error raised here would end the program too, but with a report of XLA's.
        if not closed.is_set():
            try:
                things, stop = hear(tokens)
            except BaseException as error:
                failed.append(error)
            else:
                for thing in things:
                    heard.put((thing,))
                return stop
        return np.ones(tokens.shape, bool)

    with _listening(listener) as number, ThreadPoolExecutor(1) as pool:
        future = pool.submit(program, number)
        future.add_done_callback(lambda _: heard.put(None))
        try:
            while (item := heard.get()) is not None:
                yield item[0]
        finally:
            closed.set()
    if failed:
        raise failed[0]
    return future.result()


@contextmanager
def _listening(listener: Hear) -> Iterator[int]:
    number = next(_NUMBERS)
    _LISTENERS[number] = listener
    try:
        yield number
    finally:
        del _LISTENERS[number]


def _tell(number: Any, tokens: Any) -> np.ndarray:
    return _LISTENERS[int(number)](np.asarray(tokens))
