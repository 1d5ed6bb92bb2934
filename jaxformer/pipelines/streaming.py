"""Tokens from a compiled program while it is still running."""

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
from jaxtyping import Array, Bool, Int

TokenCallback = Callable[[Int[np.ndarray, " B"]], tuple[list[Any], Bool[np.ndarray, " B"]]]
"""callback(tokens [B]) -> (items to yield, stop [B]); runs on the host after every token."""

# One compiled program serves all streams: each run gets the number of its own callback.
_CALLBACKS: dict[int, Callable[[np.ndarray], np.ndarray]] = {}
_NUMBERS = itertools.count()


def report_tokens(
    number: Int[Array, ""] | np.integer, tokens: Int[Array, " B"]
) -> Bool[Array, " B"]:
    """Calls callback `number` from inside a program; returns which texts to stop."""
    # Not `ordered`: each answer decides whether there is a next token, so the calls are in order.
    return io_callback(_call, jax.ShapeDtypeStruct(tokens.shape, bool), number, tokens)


def run_streaming(
    program: Callable[[int], Any], callback: TokenCallback
) -> Generator[Any, None, Any]:
    """Yields the items of `callback` while `program` runs; returns what `program` returns.

    `program(number)` runs in a thread and calls `report_tokens(number, ...)`. If the generator is
    closed, or the callback or the program fails, the program stops after its next token and the
    thread ends.
    """
    items: SimpleQueue[Any] = SimpleQueue()
    closed, failed = threading.Event(), []

    def on_tokens(tokens):
        # An error raised here would end the program too, but XLA would print a report of it.
        if not closed.is_set():
            try:
                new, stop = callback(tokens)
            except BaseException as error:
                failed.append(error)
            else:
                for item in new:
                    items.put((item,))
                return stop
        return np.ones(tokens.shape, bool)

    with _registered(on_tokens) as number, ThreadPoolExecutor(1) as pool:
        future = pool.submit(program, number)
        future.add_done_callback(lambda _: items.put(None))
        try:
            while (item := items.get()) is not None:
                yield item[0]
        finally:
            closed.set()
    if failed:
        raise failed[0]
    return future.result()


@contextmanager
def _registered(callback: Callable[[np.ndarray], np.ndarray]) -> Iterator[int]:
    number = next(_NUMBERS)
    _CALLBACKS[number] = callback
    try:
        yield number
    finally:
        del _CALLBACKS[number]


def _call(number: Any, tokens: Any) -> np.ndarray:
    return _CALLBACKS[int(number)](np.asarray(tokens))
