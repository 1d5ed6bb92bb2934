"""Stopping a training run between two steps when the system or the user asks for it."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

from jax.experimental.multihost_utils import reached_preemption_sync_point

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed


def asked_to_stop() -> AbstractContextManager[Callable[[], bool]]:
    """Within it, the first signal of `SIGNALS` only makes the yielded function return True.

    Call it once after each step. The loop then saves and leaves, and the process ends with 128 plus
    the signal's number. A second SIGTERM or SIGINT ends the process at once. Of several processes
    it is enough that one gets a signal: the function returns True in all of them after the same
    step, and only SIGINT counts as a second signal. SIGHUP and SIGUSR1 that are ignored at the
    start, as by nohup, stay so. The previous handlers are restored on leaving. Outside the main
    thread, which alone may have handlers, nothing asks.
    """
    if threading.current_thread() is not threading.main_thread():
        return nullcontext(lambda: False)
    return _asked_together() if distributed.is_several() else _asked_alone()


SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
"""Requests to stop: of the system, the keyboard, a terminal that closes, and a job's time limit."""
_AT_ONCE = signal.SIGTERM, signal.SIGINT


def _heeded() -> list[signal.Signals]:
    """`SIGNALS` without those that nohup ignores.

    A shell ignores SIGINT for whatever it starts in the background: that one is heard.
    """
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    return [number for number in SIGNALS if number in _AT_ONCE or number not in ignored]


def _leave_terminal() -> None:
    """Writes to nowhere: a terminal that has closed takes no more words."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)


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
            if number[0] not in handlers:
                continue
            asked.append(number[0])
            if len(asked) > 1:
                if number[0] in _AT_ONCE:
                    display.show_cursor()
                    os._exit(128 + number[0])
                continue
            if number[0] == signal.SIGHUP and is_on_terminal:
                _leave_terminal()
            name = signal.Signals(number[0]).name
            cli.say(f"{name}: saving after the current step; once more to quit now", sys.stderr)

    def note(number: int, frame: object) -> None:
        seen.append(number)

    is_on_terminal = sys.stdout.isatty() or sys.stderr.isatty()
    handlers: dict[int, Any] = {number: signal.signal(number, note) for number in _heeded()}
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
            if number == signal.SIGINT:
                raise SystemExit(128 + number)
            return
        asked.append(number)
        name = signal.Signals(number).name
        cli.say(f"{name}: saving soon; SIGINT to quit now", sys.stderr)
        signal.raise_signal(signal.SIGTERM)

    def stop() -> bool:
        if reached_preemption_sync_point(next(calls)):
            cli.say("asked to stop: saving after this step", sys.stderr)
            ending.append(asked[0] if asked else signal.SIGTERM)
        return bool(ending)

    terminate = signal.getsignal(signal.SIGTERM)
    others = [number for number in _heeded() if number != signal.SIGTERM]  # that one is JAX's
    handlers = {number: signal.signal(number, interrupt) for number in others}
    try:
        yield stop
    finally:
        for number, handler in (handlers | {signal.SIGTERM: terminate}).items():
            signal.signal(number, handler)
    if ending:
        raise SystemExit(128 + ending[0])
