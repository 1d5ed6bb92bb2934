"""Batches made ahead of the steps that take them, by a thread."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """`make(start)`, `make(start + 1)`, .. to `make(stop - 1)`, at most `depth` of them ahead.

    A thread makes them, so that reading and copying to a device happen while steps are computed.
    With `depth` 0 each is made when it is asked for. `waited` is the time in seconds that the last
    `get` took.
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int, depth: int):
        self._make = make
        self._numbers = iter(range(start, stop))
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(max(depth, 1))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self.waited = 0.0
        if depth > 0:
            self._thread.start()

    def get(self) -> T:
        """The next batch; raises here what making it raised in the thread."""
        since = time.perf_counter()
        made = self._queue.get if self._thread.ident is not None else self._next
        batch, error = made()
        self.waited = time.perf_counter() - since
        if error is not None:
            raise error
        assert batch is not None  # what has no error has a batch
        return batch

    def close(self) -> None:
        """Ends the thread, and drops what it has made."""
        self._ended.set()
        if self._thread.ident is not None:
            while self._thread.is_alive():
                self._drop()
                self._thread.join(timeout=0.05)
        self._drop()

    def _run(self) -> None:
        error: BaseException | None = None
        while error is None and not self._ended.is_set():
            batch, error = self._next()
            self._queue.put((batch, error))

    def _next(self) -> tuple[T | None, BaseException | None]:
        try:
            return self._make(next(self._numbers)), None
        except BaseException as error:  # the one who asks for the batch has to know
            return None, error

    def _drop(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()


@contextmanager
def prefetched(
    make: Callable[[int], T], start: int, stop: int, depth: int
) -> Iterator[Prefetcher[T]]:
    """Within it, a `Prefetcher`; its thread has ended when this is left."""
    batches = Prefetcher(make, start, stop, depth)
    try:
        yield batches
    finally:
        batches.close()
