"""Processes to be killed: forked from one that has imported all and touched no device."""

import itertools
import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

_PATIENCE = 900  # seconds after which a child that hangs is ended


class Count(NamedTuple):
    """The number of tries, how many ended as promised, how many used something wrong unnoticed."""

    tries: int
    survived: int
    silent: int


def counted(outcomes: Iterable[tuple[Any, str]]) -> Count:
    """The count of tries, each with its name: "survived", "silent ..." and others are printed."""
    said = []
    for name, outcome in outcomes:
        said.append(outcome)
        if outcome != "survived":
            print(f"  {name}: {outcome}", file=sys.stderr)
    silent = sum(outcome.startswith("silent") for outcome in said)
    return Count(len(said), said.count("survived"), silent)


def drawn(seed: int) -> random.Random:
    """The random numbers of an injection: the same ones in every run."""
    return random.Random(seed)


class Child:
    """A forked process that does `work(tell)`; what it tells is read line by line."""

    def __init__(self, work: Callable[[Callable[[Any], None]], None]):
        reading, writing = os.pipe()
        sys.stdout.flush()
        with warnings.catch_warnings():
            # JAX warns of every fork; here no backend and no thread of it exists yet.
            warnings.simplefilter("ignore", RuntimeWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _work_and_leave(work, writing)
        os.close(writing)
        self._lines = os.fdopen(reading)

    def told(self) -> Iterator[Any]:
        """The lines that it writes until it ends; a line that a kill tore is left out."""
        for line in self._lines:
            if line.endswith("\n"):
                yield json.loads(line)

    def send(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._lines.close()
        return code


def in_child(work: Callable[..., Any], *args: Any) -> Any:
    """The result of `work(*args)` in a process of its own, which may use devices."""
    child = Child(lambda tell: tell(work(*args)))
    told = list(child.told())
    code = child.wait()
    if code != 0 or len(told) != 1:
        raise RuntimeError(f"a child ended with {code} after telling {told}")
    return told[0]


def counted_in_child(work: Callable[..., Iterable[tuple[Any, str]]], *args: Any) -> Count:
    """The count of the tries that `work(*args)` makes in a process of its own."""
    return counted(in_child(lambda: list(work(*args))))


def in_calls(
    owner: Any, name: str, visit: Callable[..., Iterator[None]]
) -> AbstractContextManager[Any]:
    """Within it each call of `owner.name` happens at the `yield` of `visit(number, *args)`.

    Calls are numbered from 1.
    """
    call, numbers = getattr(owner, name), itertools.count(1)

    def visited(*args: Any, **named: Any) -> Any:
        with contextmanager(visit)(next(numbers), *args):
            return call(*args, **named)

    return mock.patch.object(owner, name, visited)


def die(number: int = signal.SIGKILL) -> None:
    """Sends this process a signal."""
    os.kill(os.getpid(), number)


def _work_and_leave(work: Callable, writing: int) -> None:
    """Never returns: what belongs to the parent must not be closed or flushed here."""
    code = 1
    signal.alarm(_PATIENCE)
    try:
        with os.fdopen(writing, "w", buffering=1) as pipe:
            work(lambda value: print(json.dumps(value), file=pipe, flush=True))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
