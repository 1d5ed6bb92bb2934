"""Each thing that is measured in a process of its own, so that their thread pools do not meet."""

import contextlib
import multiprocessing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from experiments.benchmarks.alternate import Cost, Measure, Summary, alternate, summarise, timed
from jaxformer.config import ConfigError
from jaxformer.extras import MissingExtra


class Subject(NamedTuple):
    """`run()` does what is measured, once and to its end; `facts` are told with the result."""

    run: Callable[[], object]
    facts: dict[str, Any]


Make = Callable[[], Subject]
"""What makes a subject; it can be pickled (`functools.partial` of a module's function)."""


class Comparison(NamedTuple):
    """Results and facts by name, and of those that could not be measured the reason."""

    measured: dict[str, Summary]
    facts: dict[str, dict[str, Any]]
    missing: dict[str, str]


_PATIENCE = 10.0  # seconds, for a process that nobody asks any more
_DECIDED = (ConfigError, MissingExtra)


class _Ended(Exception):
    """The process of a subject is no more."""


def compare(
    makes: Mapping[str, Make],
    *,
    peers: Collection[str],
    rounds: int,
    count: int,
    warm_up: int,
) -> Comparison:
    """Each of `makes` in its own process, in turn: `rounds` times `count` repetitions.

    They are made one after the other, and each repeats `warm_up` times before the clock starts.
    One that refuses (`ConfigError`, `MissingExtra`) or whose process ends before is left out, and
    its reason is told; `ratio` is to the best of `peers`. Raises `RuntimeError` when a process ends
    later.
    """
    measures: dict[str, Measure] = {}
    facts, missing = {}, {}
    with contextlib.ExitStack() as stack:
        for name, make in makes.items():
            try:
                facts[name], measures[name] = stack.enter_context(_started(make, warm_up))
            except (*_DECIDED, _Ended) as error:
                missing[name] = str(error)
        try:
            costs = alternate(measures, rounds=rounds, count=count)
        except _Ended as error:
            raise RuntimeError(f"a subject could not be measured to the end: {error}") from error
    return Comparison(summarise(costs, peers), facts, missing)


@contextmanager
def _started(make: Make, warm_up: int) -> Iterator[tuple[dict[str, Any], Measure]]:
    """The facts of the subject, and what measures it; its process ends with the context."""
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
        process.join(_PATIENCE)
        process.terminate()
        process.join()


def _serve(connection: Connection, make: Make, warm_up: int) -> None:
    """In the process of the subject: measures it as often as asked, until nobody asks any more."""
    try:
        subject = make()
    except _DECIDED as error:
        connection.send(error)
        return
    for _ in range(warm_up):
        subject.run()
    connection.send(subject.facts)
    measure = timed(subject.run)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(measure(connection.recv()))
