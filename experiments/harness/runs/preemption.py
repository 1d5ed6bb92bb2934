"""Stopping a training run between two steps when the system or the user asks for it."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count

from jax.experimental.multihost_utils import reached_preemption_sync_point

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed


def asked_to_stop() -> AbstractContextManager[Callable[[], bool]]:
    """Within it, the first SIGTERM or SIGINT only makes the yielded function return True.

    Call it once after each step. The loop then saves and leaves, and the process ends with code
    143 or 130. A second signal ends the process at once. Of several processes it is enough that
    one gets a signal: the function returns True in all of them after the same step, and only
    SIGINT counts as a second signal. The previous handlers are restored on leaving.
    """
    return _asked_together() if distributed.is_several() else _asked_alone()


_SIGNALS = signal.SIGTERM, signal.SIGINT


@contextmanager
def _asked_alone() -> Iterator[Callable[[], bool]]:
    """Signals are answered in a thread, since the main thread may be in XLA, which compiles.

    Python writes the number of a signal to the file descriptor for wake-ups at once, and calls
    handlers only between two instructions of the main thread. There the main thread sees it before
    its next step.
    """
    asked: list[int] = []
    seen: list[int] = []
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def answer() -> None:
        while number := reader.recv(1):
            if number[0] not in _SIGNALS:
                continue
            asked.append(number[0])
            if len(asked) > 1:
                display.show_cursor()
                os._exit(128 + number[0])
            name = signal.Signals(number[0]).name
            cli.say(f"{name}: saving after the current step; once more to quit now", sys.stderr)

    def note(number: int, frame: object) -> None:
        seen.append(number)

    handlers = {number: signal.signal(number, note) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writer.fileno())
    thread = threading.Thread(target=answer, name="signals", daemon=True)
    thread.start()
    try:
        yield lambda: bool(seen or asked)
    finally:
        signal.set_wakeup_fd(wakeup)
        writer.close()
        thread.join()
        reader.close()
        for number, handler in handlers.items():
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
        cli.say("SIGINT: saving soon; once more to quit now", sys.stderr)
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
