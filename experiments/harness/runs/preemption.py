"""Stopping a training run between two steps when the system or the user asks for it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from jax.experimental.multihost_utils import reached_preemption_sync_point

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
"""Requests to stop: of the system, the keyboard, a terminal that closes, and a job's time limit."""
_AT_ONCE = signal.SIGTERM, signal.SIGINT


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Within it, the first signal of `SIGNALS` only makes the yielded function return True.

    Call it once after each step. The loop then saves and leaves, and the process ends with 128 plus
    the signal's number. A second SIGTERM or SIGINT ends the process at once (while XLA compiles, as
    soon as it has). Of several processes it is enough that one gets a signal: JAX's runtime passes
    SIGTERM on, and the function returns True in all of them after the same step; only SIGINT counts
    as a second signal. SIGHUP and SIGUSR1 that are ignored at the start, as by nohup, stay so. The
    previous handlers are restored on leaving. Outside the main thread, which alone may have
    handlers, nothing asks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked: list[int] = []
    ending: list[int] = []
    calls, several = count(1), distributed.is_several()
    is_on_terminal = sys.stdout.isatty() or sys.stderr.isatty()

    def note(number: int, frame: object) -> None:
        if asked and number in _AT_ONCE:
            display.show_cursor()
            os._exit(128 + number)
        asked.append(number)
        if number == signal.SIGHUP and is_on_terminal:  # which takes no more words
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nowhere, stream)
        if several and len(asked) == 1:
            signal.raise_signal(signal.SIGTERM)

    def stop() -> bool:
        # JAX agrees in the background on a step that no process has passed: a call costs no message
        is_asked = reached_preemption_sync_point(next(calls)) if several else bool(asked)
        if is_asked and not ending:
            ending.extend(asked[:1] or [signal.SIGTERM])
            name = signal.Signals(ending[0]).name
            cli.say(f"{name}: saving after the current step; once more to quit now", sys.stderr)
        return bool(ending)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        is_ours = number != signal.SIGTERM if several else True  # that one is JAX's
        # A shell ignores SIGINT for whatever it starts in the background: that one is heard.
        if is_ours and (number in _AT_ONCE or handler is not signal.SIG_IGN):
            signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if ending or (asked and not several):
        raise SystemExit(128 + (ending or asked)[0])
