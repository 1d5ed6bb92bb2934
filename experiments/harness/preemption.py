"""Stopping a training run between two steps when the system or the user asks for it."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

from jax.experimental.multihost_utils import reached_preemption_sync_point

from experiments.harness import cli, distributed


def asked_to_stop() -> AbstractContextManager[Callable[[], bool]]:
    """Within it, the first SIGTERM or SIGINT only makes the yielded function return True.

    Call it once after each step. The loop then saves and leaves, and the process ends with code
    143 or 130. A second signal ends it at once. Of several processes it is enough that one gets a
    signal: the function returns True in all of them after the same step, and only SIGINT counts as
    a second signal. The previous handlers are restored on leaving.
    """
    return _asked_together() if distributed.is_several() else _asked_alone()


@contextmanager
def _asked_alone() -> Iterator[Callable[[], bool]]:
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        if asked:
            raise SystemExit(128 + number)
        asked.append(number)
        name = signal.Signals(number).name
        cli.say(f"{name}: saving after this step; once more to stop at once", sys.stderr)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if asked:
        raise SystemExit(128 + asked[0])


@contextmanager
def _asked_together() -> Iterator[Callable[[], bool]]:
    """As `asked_to_stop` for several processes: JAX's runtime passes SIGTERM on to the others.

    In the background it agrees on a step that no process has passed; a step costs no message.
    """
    calls = count(1)
    asked: list[int] = []
    ending: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if asked:
            raise SystemExit(128 + number)
        asked.append(number)
        cli.say("SIGINT: saving soon; once more to stop at once", sys.stderr)
        signal.raise_signal(signal.SIGTERM)

    def stop() -> bool:
        if reached_preemption_sync_point(next(calls)):
            cli.say("asked to stop: saving after this step", sys.stderr)
            ending.append(asked[0] if asked else signal.SIGTERM)
        return bool(ending)

    terminate, previous = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.signal(signal.SIGTERM, terminate)
    if ending:
        raise SystemExit(128 + ending[0])
