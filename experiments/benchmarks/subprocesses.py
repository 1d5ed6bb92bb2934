"""Measures each case in a process of its own, so that their thread pools do not compete."""

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from experiments.benchmarks.interleaved_timing import (
    Cost,
    Measure,
    Summary,
    TimingConfig,
    measure_in_turn,
    summarise,
    timed,
)
from jaxformer.errors import ConfigError, MissingExtra


def _return_at_once(result: Any) -> None:
    pass


class Case(NamedTuple):
    """A case to measure: `run()` starts the work once, and `wait(result)` waits for its end.

    `metadata` is reported. "tokens" and "flops" are those of one `run()`.
    """

    run: Callable[[], Any]
    metadata: dict[str, Any]
    wait: Callable[[Any], object] = _return_at_once


MakeCase = Callable[[], Case]
"""make() -> Case. It is pickled: use `functools.partial` of a module's function."""


class Comparison(NamedTuple):
    """Results and metadata by name; `missing` holds the reason for each that was not measured."""

    measured: dict[str, Summary]
    metadata: dict[str, dict[str, Any]]
    missing: dict[str, str]


_EXIT_SECONDS = 10.0  # how long a process may take to end


class CaseFailed(Exception):
    """The case could not be made or measured."""


def compare(
    makes: Mapping[str, MakeCase], timing: TimingConfig, *, peers: Collection[str]
) -> Comparison:
    """Measures each of `makes` in its own process.

    With `timing.interleaved` all processes start and warm up, and are then measured in turn;
    otherwise one after the other. A case that fails before the first round is left out with its
    reason. Ratios are to the fastest of `peers`. An interleaved case that fails
    later raises `RuntimeError`.
    """
    groups = [makes] if timing.interleaved else [{name: make} for name, make in makes.items()]
    costs: dict[str, list[Cost]] = {}
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
                costs |= measure_in_turn(measures, timing)
            except CaseFailed as error:
                if timing.interleaved:
                    raise RuntimeError(f"a case was not measured to the end: {error}") from error
                missing |= {name: str(error) for name in group}
    return Comparison(summarise(costs, peers), metadata, missing)


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

    def measure(count: int) -> Cost:
        connection.send(count)
        return receive()

    try:
        yield receive(), measure
    finally:
        connection.close()
        process.join(_EXIT_SECONDS)
        process.terminate()
        process.join()


def _serve(connection: Connection, make: MakeCase, warm_up: int) -> None:
    """Runs in the case's process: measures it at each request, until the connection closes."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        try:
            case = make()
            for _ in range(warm_up):
                case.wait(case.run())
            connection.send(case.metadata)
            measure = timed(case.run, case.wait)
            while True:
                connection.send(measure(connection.recv()))
        except (EOFError, BrokenPipeError):
            raise
        except (ConfigError, MissingExtra) as error:
            connection.send(CaseFailed(str(error)))
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            connection.send(CaseFailed(f"{type(error).__name__}: {first}"[:500]))
