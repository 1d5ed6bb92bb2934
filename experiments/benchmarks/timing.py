"""Cases timed in turn, each in a process of its own.

A disturbance of the machine reaches all of them, and their thread pools do not compete.
"""

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
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


class Case(NamedTuple):
    """A case to measure: `run()` starts the work once, and `wait(result)` waits for its end.

    `metadata` is reported. "tokens" and "flops" are those of one `run()`.
    """

    run: Callable[[], Any]
    metadata: dict[str, Any]
    wait: Callable[[Any], object] = lambda result: None


MakeCase = Callable[[], Case]
"""make() -> Case. It is pickled: use `functools.partial` of a module's function."""
Measure = Callable[[int], float]
"""measure(count) -> the mean elapsed seconds of one of `count` repetitions."""


class Summary(NamedTuple):
    """Elapsed seconds of one repetition, over all rounds.

    `spread` is the interquartile range divided by the median, 0 for one round. `ratio` is `median`
    divided by the median of the fastest peer, None where no peer was measured.
    """

    median: float
    least: float
    spread: float
    ratio: float | None


class Comparison(NamedTuple):
    """Results and metadata by name; `missing` holds the reason for each that was not measured."""

    measured: dict[str, Summary]
    metadata: dict[str, dict[str, Any]]
    missing: dict[str, str]


class CaseFailed(Exception):
    """The case could not be made or measured."""


def compare(
    makes: Mapping[str, MakeCase], timing: TimingConfig, *, peers: Collection[str] = ()
) -> Comparison:
    """Measures each of `makes` in its own process; ratios are to the fastest of `peers`.

    With `timing.interleaved` all processes start and warm up, and are then measured in turn;
    otherwise one after the other. A case that fails before the first round is left out with its
    reason. An interleaved case that fails later raises `RuntimeError`.
    """
    groups = [makes] if timing.interleaved else [{name: make} for name, make in makes.items()]
    seconds: dict[str, list[float]] = {}
    metadata: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    for group in groups:
        with contextlib.ExitStack() as stack:
            measures: dict[str, Measure] = {}
            for name, make in group.items():
                try:
                    metadata[name], measures[name] = stack.enter_context(_started(make, timing))
                except CaseFailed as error:
                    missing[name] = str(error)
            try:
                seconds |= measure_in_turn(measures, timing)
            except CaseFailed as error:
                if timing.interleaved:
                    raise RuntimeError(f"a case was not measured to the end: {error}") from error
                missing |= {name: str(error) for name in group}
    return Comparison(summarise(seconds, peers), metadata, missing)


def measure_in_turn(
    measures: Mapping[str, Measure], timing: TimingConfig
) -> dict[str, list[float]]:
    """The seconds of each of `measures` in each round. All of them have warmed up before."""
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(timing.rounds):
        for name, measure in measures.items():
            seconds[name].append(measure(timing.repetitions))
    return seconds


def summarise(seconds: Mapping[str, Sequence[float]], peers: Collection[str]) -> dict[str, Summary]:
    """A summary of the rounds of each case."""
    medians = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    best = min((medians[name] for name in peers if name in medians), default=None)
    return {
        name: Summary(
            median=medians[name],
            least=min(rounds),
            spread=_interquartile_range(rounds) / medians[name],
            ratio=None if best is None else medians[name] / best,
        )
        for name, rounds in seconds.items()
    }


def _interquartile_range(seconds: Sequence[float]) -> float:
    if len(seconds) == 1:
        return 0.0
    lower, _, upper = statistics.quantiles(seconds, method="inclusive")
    return upper - lower


@contextmanager
def _started(make: MakeCase, timing: TimingConfig) -> Iterator[tuple[dict[str, Any], Measure]]:
    """Starts a process; gives the case's metadata and the function that measures it."""
    # fork would copy the locks of libraries that run threads
    context = multiprocessing.get_context("spawn")
    connection, other_end = context.Pipe()
    process = context.Process(target=_serve, args=(other_end, make, timing.warm_up))
    process.start()
    other_end.close()
    end = time.monotonic() + timing.case_seconds

    def receive() -> Any:
        if not connection.poll(max(end - time.monotonic(), 0.0)):
            process.kill()
            raise CaseFailed(f"took longer than case_seconds={timing.case_seconds:g}")
        try:
            answer = connection.recv()
        except EOFError:
            process.join()
            raise CaseFailed(f"its process ended with code {process.exitcode}") from None
        if isinstance(answer, CaseFailed):
            raise answer
        return answer

    def measure(count: int) -> float:
        connection.send(count)
        return receive()

    try:
        yield receive(), measure
    finally:
        connection.close()
        process.join(timeout=10.0)
        process.terminate()
        process.join()


ALONE: dict[str, Any] = {
    "rounds": 5,
    "repetitions": 3,
    "case_seconds": 180.0,
    "interleaved": False,
}
"""Options of cases that share one accelerator."""


def _serve(connection: Connection, make: MakeCase, warm_up: int) -> None:
    """Runs in the case's process: measures it at each request, until the connection closes."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            case = make()
            for _ in range(warm_up):
                case.wait(case.run())
            connection.send(case.metadata)
            while True:
                connection.send(seconds_of(case, connection.recv()))
        except (EOFError, BrokenPipeError):
            raise
        except (ConfigError, MissingExtra) as error:
            connection.send(CaseFailed(str(error)))
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            connection.send(CaseFailed(f"{type(error).__name__}: {first}"[:500]))


def seconds_of(case: Case, count: int) -> float:
    """The mean elapsed seconds of one of `count` repetitions."""
    begin = time.perf_counter()
    for _ in range(count):
        result = case.run()
    case.wait(result)
    return (time.perf_counter() - begin) / count
