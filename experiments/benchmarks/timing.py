"""Cases timed in turn, each in a process of its own.

A disturbance of the machine reaches all of them, and their thread pools do not compete.
"""

import contextlib
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from jaxformer.config import Checked, Count, Range
from jaxformer.errors import ConfigError, MissingExtra


@dataclass(frozen=True)
class TimingConfig(Checked):
    """The number of measurements, and the file of the result."""

    name: str = "benchmark"
    """Name of the result file, RUNS/benchmarks/NAME.json."""
    rounds: Count = 7
    """Number of rounds. Each round measures every case once, in order."""
    repetitions: Count = 1
    """Repetitions of each case in a round."""
    warm_up: Count = 1
    """Repetitions of each case before the first round; they are not measured."""
    case_seconds: Annotated[float, Range(1)] = 900.0
    """Seconds after which a case that is not measured yet is given up."""
    interleaved: bool = True
    """Measures the cases of a table in turn; otherwise one after the other, each alone, as cases
    must be that need most of a GPU's memory."""
    runs: str = "runs"
    """Folder of all runs."""


ALONE: dict[str, Any] = {
    "rounds": 5,
    "repetitions": 3,
    "case_seconds": 180.0,
    "interleaved": False,
}
"""Options of cases that share one accelerator."""


class Case(NamedTuple):
    """A case to measure: `run()` starts the work once, and `wait(result)` waits for its end.

    `metadata` is reported. "tokens" and "flops" count one `run()`.
    """

    run: Callable[[], Any]
    metadata: dict[str, Any]
    wait: Callable[[Any], object] = lambda result: None

    def seconds(self, count: int) -> float:
        """The mean elapsed seconds of one of `count` repetitions."""
        begin = time.perf_counter()
        for _ in range(count):
            result = self.run()
        self.wait(result)
        return (time.perf_counter() - begin) / count


MakeCase = Callable[[], Case]
"""make() -> Case. It is pickled: use `functools.partial` of a module's function."""


class Timing(NamedTuple):
    """Elapsed seconds of one repetition of a case, over all rounds, and its metadata.

    `spread` is the interquartile range divided by the median, 0 for one round. `ratio` is `median`
    divided by the median of the fastest peer, None where no peer was measured.
    """

    median: float
    least: float
    spread: float
    metadata: dict[str, Any]
    ratio: float | None = None


class Timings(NamedTuple):
    """Timings by name; `missing` holds the reason for each case that was not measured."""

    measured: dict[str, Timing]
    missing: dict[str, str]


class CaseFailed(Exception):
    """The case could not be made or measured."""


def measure_cases(
    makes: Mapping[str, MakeCase], timing: TimingConfig, *, peers: Collection[str] = ()
) -> Timings:
    """Measures each of `makes` in its own process; ratios are to the fastest of `peers`.

    With `timing.interleaved` all processes start and warm up, and are then measured in turn;
    otherwise one after the other. A case that fails is left out with its reason.
    """
    groups = [makes] if timing.interleaved else [{name: make} for name, make in makes.items()]
    workers: dict[str, _Worker] = {}
    for group in groups:
        with contextlib.ExitStack() as stack:
            started = {name: _Worker(make, timing, stack) for name, make in group.items()}
            for _ in range(timing.rounds):
                for worker in started.values():
                    worker.measure(timing.repetitions)
        workers |= started
    measured = {
        name: summarise(worker.seconds, worker.metadata)
        for name, worker in workers.items()
        if not worker.failure
    }
    best = min((measured[name].median for name in peers if name in measured), default=None)
    if best is not None:
        measured = {name: x._replace(ratio=x.median / best) for name, x in measured.items()}
    return Timings(measured, {name: x.failure for name, x in workers.items() if x.failure})


def summarise(seconds: Sequence[float], metadata: dict[str, Any]) -> Timing:
    """The timing of a case, without its ratio."""
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, method="inclusive") if len(seconds) > 1 else [0.0] * 3
    return Timing(median, min(seconds), (quartiles[2] - quartiles[0]) / median, metadata)


class _Worker:
    """A case in a process of its own, which ends with `stack`; `failure` is why it was given up."""

    def __init__(self, make: MakeCase, timing: TimingConfig, stack: contextlib.ExitStack) -> None:
        self.failure = ""
        self.seconds: list[float] = []
        # fork would copy the locks of libraries that run threads
        context = multiprocessing.get_context("spawn")
        self._pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=context))
        self._process = self._pool.submit(os.getpid).result()
        self._allowed, self._end = timing.case_seconds, time.monotonic() + timing.case_seconds
        self.metadata: dict[str, Any] = self._call(_make, make, timing.warm_up)

    def measure(self, count: int) -> None:
        """Adds the mean seconds of one of `count` repetitions, unless the case has failed."""
        if not self.failure:
            self.seconds.append(self._call(_seconds, count))

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            future = self._pool.submit(_guarded, function, *args)
            return future.result(max(self._end - time.monotonic(), 0.0))
        except CaseFailed as error:
            self.failure = str(error)
        except TimeoutError:
            os.kill(self._process, signal.SIGKILL)
            self.failure = f"took longer than case_seconds={self._allowed:g}"
        except BrokenProcessPool:
            self.failure = "its process has ended"


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function`; every error as a `CaseFailed`, which another process can read."""
    try:
        return function(*args)
    except (ConfigError, MissingExtra) as error:
        raise CaseFailed(str(error)) from None
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise CaseFailed(f"{type(error).__name__}: {first}"[:500]) from None


_case: Case | None = None
"""The case that this process measures."""


def _make(make: MakeCase, warm_up: int) -> dict[str, Any]:
    """Makes the case of this process, and runs it `warm_up` times; its metadata."""
    global _case
    _case = make()
    for _ in range(warm_up):
        _case.wait(_case.run())
    return _case.metadata


def _seconds(count: int) -> float:
    """The mean seconds of the case of this process."""
    assert _case is not None
    return _case.seconds(count)
