"""Measures each subject in a process of its own, so that their thread pools do not compete."""

import contextlib
import multiprocessing
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


class Subject(NamedTuple):
    """What is measured: `run()` does the work once and waits for it; `facts` are reported."""

    run: Callable[[], object]
    facts: dict[str, Any]


Make = Callable[[], Subject]
"""make() -> Subject. It is pickled: use `functools.partial` of a module's function."""


class Comparison(NamedTuple):
    """Results and facts by name; `missing` holds the reason for each that was not measured."""

    measured: dict[str, Summary]
    facts: dict[str, dict[str, Any]]
    missing: dict[str, str]


_EXIT_SECONDS = 10.0  # how long a process may take to end
_REFUSED = (ConfigError, MissingExtra)


class _Ended(Exception):
    """The process of a subject has ended."""


def compare(
    makes: Mapping[str, Make], timing: TimingConfig, *, peers: Collection[str]
) -> Comparison:
    """Measures each of `makes` in its own process, in turn.

    The processes start one after the other, and each warms up before the first round. A subject
    that raises `ConfigError` or `MissingExtra`, or whose process ends before the first round, is
    left out with its reason. Ratios are to the fastest of `peers`. Raises `RuntimeError` when a
    process ends later.
    """
    measures: dict[str, Measure] = {}
    facts, missing = {}, {}
    with contextlib.ExitStack() as stack:
        for name, make in makes.items():
            try:
                facts[name], measures[name] = stack.enter_context(_started(make, timing.warm_up))
            except (*_REFUSED, _Ended) as error:
                missing[name] = str(error)
        try:
            costs = measure_in_turn(measures, timing)
        except _Ended as error:
            raise RuntimeError(f"a subject could not be measured to the end: {error}") from error
    return Comparison(summarise(costs, peers), facts, missing)


@contextmanager
def _started(make: Make, warm_up: int) -> Iterator[tuple[dict[str, Any], Measure]]:
    """Starts a process; gives the subject's facts and the function that measures it."""
    # fork would copy the locks of libraries that run threads
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, warm_up))
    process.start()
    theirs.close()

    def receive() -> Any:
        try:
            return ours.recv()
        except EOFError:
            process.join()
            raise _Ended(f"its process ended with code {process.exitcode}") from None

    def measure(count: int) -> Cost:
        ours.send(count)
        return receive()

    try:
        said = receive()
        if isinstance(said, Exception):
            raise said
        yield said, measure
    finally:
        ours.close()
        process.join(_EXIT_SECONDS)
        process.terminate()
        process.join()


def _serve(connection: Connection, make: Make, warm_up: int) -> None:
    """Runs in the subject's process: measures it at each request, until the connection closes."""
    try:
        subject = make()
    except _REFUSED as error:
        connection.send(error)
        return
    for _ in range(warm_up):
        subject.run()
    connection.send(subject.facts)
    measure = timed(subject.run)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(measure(connection.recv()))
