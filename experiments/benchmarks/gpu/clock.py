"""How long one of many repetitions takes on a device that is told of them ahead."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

_STRETCH = 0.2  # seconds after which waiting for the device no longer matters
_LEAST = 3  # rounds


class Pace(NamedTuple):
    """Seconds of a repetition over `rounds` of `count` each: the median, and the least."""

    median: float
    least: float
    rounds: int
    count: int

    def facts(self) -> dict[str, Any]:
        """As it is written, in ms."""
        times = {"ms": self.median * 1e3, "least_ms": self.least * 1e3}
        return times | {"rounds": self.rounds, "repetitions": self.count}


def pace(
    start: Callable[[], Any],
    wait: Callable[[Any], object],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Pace:
    """The pace of `start()`, which may return before its work is done; `wait` waits for that.

    Twice it runs unmeasured, which includes compilation, once to find out how many repetitions
    make a round; then for about `seconds`, but for 3 rounds at least.
    """

    def stretch(count: int) -> float:
        begin = clock()
        for _ in range(count):
            last = start()
        wait(last)
        return (clock() - begin) / count

    stretch(2)
    once = max(stretch(1), 1e-9)
    count = max(1, math.ceil(_STRETCH / once))
    rounds = max(_LEAST, int(seconds / (once * count)))
    times = [stretch(count) for _ in range(rounds)]
    return Pace(statistics.median(times), min(times), rounds, count)
