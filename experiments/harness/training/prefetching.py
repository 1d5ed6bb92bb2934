"""Batches that a thread makes ahead of the steps."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Prefetched:
    """`make(start)`, `make(start + 1)`, .. to `make(stop - 1)`, at most `depth` of them ahead.

    A thread makes them, so that reading and copying to a device happen while steps are computed.
    With `depth` 0 each is made when it is asked for. `waited` is the time in seconds that the last
    `get` took.
    """

    def __init__(self, make: Callable[[int], Any], start: int, stop: int, depth: int):
        self._make, self._depth = make, depth
        self._numbers = iter(range(start, stop))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._waiting: deque[Future] = deque()
        self.waited = 0.0
        self._fill()

    def get(self) -> Any:
        """The next batch; raises here what making it raised in the thread."""
        since = time.perf_counter()
        if self._depth:
            batch = self._waiting.popleft().result()
            self._fill()
        else:
            batch = self._make(next(self._numbers))
        self.waited = time.perf_counter() - since
        return batch

    def close(self) -> None:
        """Ends the thread when it has made the batch that it is at, and drops the others."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        for number in itertools.islice(self._numbers, self._depth - len(self._waiting)):
            self._waiting.append(self._pool.submit(self._make, number))
