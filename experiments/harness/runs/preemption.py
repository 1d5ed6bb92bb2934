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
from experiments.harness.runs import distributed
from experiments.harness.cli import display


def asked_to_stop() -> AbstractContextManager[Callable[[], bool]]:
    """Within it, the first SIGTERM or SIGINT only makes the yielded function return True.

    Call it once after each step. The loop then saves and leaves, and the process ends with code
    143 or 130. A second signal ends it at once. Of several processes it is enough that one gets a
    signal: the function returns True in all of them after the same step, and only SIGINT counts as
    a second signal. The previous handlers are restored on leaving.
    """
    return _asked_together() if distributed.is_several() else _asked_alone()


_SIGNALS = signal.SIGTERM, signal.SIGINT


@contextmanager
def _asked_alone() -> Iterator[Callable[[], bool]]:
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise SystemExit(128 + number)
        name = signal.Signals(number).name
        if not watch.answered.is_set():
            cli.say(f"{name}: saving after this step; once more to stop at once", sys.stderr)

    watch = _Watch(asked)
    previous = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        with watch:
            yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if asked:
        raise SystemExit(128 + asked[0])


class _Watch:
    """Answers the signals that the main thread cannot, as while XLA compiles.

    Python calls handlers in the main thread, between two of its instructions. Its file descriptor
    for wake-ups gets the number of a signal at once. A thread reads it, and answers unless the
    main thread has noted it in `asked` a moment later.
    """

    def __init__(self, asked: list[int], patience: float = 0.5):
        self.answered = threading.Event()
        self._asked = asked
        self._patience = patience
        self._seen = 0
        self._closed = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def __enter__(self) -> None:
        self._previous = signal.set_wakeup_fd(self._writer.fileno())
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        signal.set_wakeup_fd(self._previous)
        self._writer.close()

    def _run(self) -> None:
        while number := self._reader.recv(1):
            if number[0] in _SIGNALS:
                self._seen += 1
                handled = self._closed.wait(self._patience) or len(self._asked) >= self._seen
                if not handled:
                    self._answer(signal.Signals(number[0]))
        self._reader.close()

    def _answer(self, number: signal.Signals) -> None:
        """Says that the wish is known, or ends the process at the second one."""
        if self._seen > 1:
            display.show_cursor()
            os._exit(128 + number)
        self.answered.set()
        what = "saving when this step is compiled and made; once more to stop at once"
        cli.say(f"{number.name}: {what}", sys.stderr)


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
