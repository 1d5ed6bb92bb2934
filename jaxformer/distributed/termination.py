"""Signals that ask one of several processes to end, heard also while it waits for another one."""

import ctypes
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from jax.experimental import multihost_utils

_QUITTING = signal.SIGTERM, signal.SIGINT
"""Signals of which the second one ends a process at once."""
_UNWINDING = 5.0
"""Seconds in which a process that was asked to end leaves its blocks."""
_STEP = 30.0
"""Seconds in which a loop that was asked to stop comes to the end of its step."""
_LONGEST_STEPS = 3.0
"""The longest steps so far that it may take, where these are more."""

_log = logging.getLogger(__name__)


class Termination(AbstractContextManager["Termination"]):
    """A signal ends this process within it, even where the main thread waits for another process.

    JAX's runtime takes SIGTERM for a notice that a loop may ask for, and does nothing else: a
    process whose program waits for another one would not end. A thread hears the signals instead.

    Outside of `requests` a signal of `numbers` raises `SystemExit` in the main thread
    (`KeyboardInterrupt` for SIGINT); if that has not ended the process after five seconds, the
    thread does, with 128 plus the signal's number. A second SIGTERM or SIGINT ends it at once.
    Enter it in the main thread, after `initialize`. The thread calls `say` with the reason of an
    end, `at_first` with the number of the first signal, and `at_end` before it ends the process.
    """

    def __init__(
        self,
        numbers: Sequence[int] = _QUITTING,
        *,
        say: Callable[[str], None] = _log.warning,
        at_first: Callable[[int], None] = lambda number: None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.number: int | None = None
        """The first signal; None before it."""
        self._numbers = tuple(numbers)
        self._say, self._at_first, self._at_end = say, at_first, at_end
        self._loop: _Loop | None = None
        self._deadline: float | None = None

    def __enter__(self) -> "Termination":
        self._notice = _c_handler(signal.SIGTERM)
        self._before = {number: signal.getsignal(number) for number in self._numbers}
        for number in self._numbers:
            signal.signal(number, self._unwind)
        self._hearing, self._heard = socket.socketpair()
        self._heard.setblocking(False)
        self._earlier_fd = signal.set_wakeup_fd(
            self._heard.fileno(), warn_on_full_buffer=False
        )  # Python writes there the number of each signal, whatever the main thread does
        self._thread = threading.Thread(target=self._listen, daemon=True, name="signals")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._earlier_fd)
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _set_c_handler(signal.SIGTERM, self._notice)
        self._heard.close()
        self._thread.join()
        self._hearing.close()

    @contextmanager
    def requests(
        self, is_saving: Callable[[], bool] = lambda: False
    ) -> Iterator[Callable[[], bool]]:
        """Within it, the first signal only makes the yielded function return True.

        All processes call it after each step, and it returns True in all after the same step. A
        process that does not come to the end of a step in thirty seconds (or three times the
        longest step so far) waits for another one: it ends, unless `is_saving()`, which is asked
        in another thread.

        Raises `SystemExit` at the end if a signal came after the last step.
        """
        self._loop = loop = _Loop(is_saving)
        try:
            yield loop.is_asked_to_stop
        finally:
            self._loop = None
        if self.number is not None and not loop.stops:
            raise SystemExit(128 + self.number)

    def _unwind(self, number: int, frame: Any) -> None:
        """Handles a signal in the main thread."""
        if self._loop is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _listen(self) -> None:
        while True:
            self._hearing.settimeout(None if self._deadline is None else 0.2)
            try:
                heard = self._hearing.recv(64)
            except TimeoutError:
                heard = None
            if heard == b"":
                return
            for number in heard or b"":
                if number in self._numbers:
                    self._hear(number)
            self._end_if_late()

    def _hear(self, number: int) -> None:
        if self.number is not None:
            if number in _QUITTING:
                self._at_end()
                os._exit(128 + number)
            return
        self.number = number
        self._at_first(number)
        self._deadline = time.monotonic() + (_UNWINDING if self._loop is None else self._loop.grace)
        if self._loop is not None:
            self._give_notice()

    def _give_notice(self) -> None:
        """Lets JAX's own handler tell all processes that one is asked to stop."""
        ours = _c_handler(signal.SIGTERM)
        if not _is_another_function(self._notice, ours):
            return  # JAX was told to listen to no signals
        _set_c_handler(signal.SIGTERM, self._notice)
        signal.raise_signal(signal.SIGTERM)  # is handled in this thread before it returns
        _set_c_handler(signal.SIGTERM, ours)

    def _end_if_late(self) -> None:
        loop, number = self._loop, self.number
        if self._deadline is None or number is None or time.monotonic() < self._deadline:
            return
        if loop is not None and (loop.stops or loop.is_saving()):
            return
        name = signal.Signals(number).name
        if loop is not None:
            self._say(
                f"{name}: the step has not ended, so another process has not joined it: this one "
                "ends without saving, and the next start resumes from the newest checkpoint"
            )
        self._at_end()
        os._exit(128 + number)


class _Loop:
    """A loop that asks after each step whether it is to stop."""

    def __init__(self, is_saving: Callable[[], bool]) -> None:
        self.is_saving = is_saving
        self.stops = False
        self._calls = count(1)
        self._asked_at: float | None = None
        self._longest = 0.0

    @property
    def grace(self) -> float:
        """Seconds that a step may take after a signal."""
        return max(_STEP, _LONGEST_STEPS * self._longest)

    def is_asked_to_stop(self) -> bool:
        """Whether a process was asked to stop: the same answer in all of them."""
        now = time.monotonic()
        if self._asked_at is not None:  # the first step compiles
            self._longest = max(self._longest, now - self._asked_at)
        self._asked_at = now
        # JAX agrees in the background on a step that no process has passed: a call costs no message
        if not self.stops:
            self.stops = multihost_utils.reached_preemption_sync_point(next(self._calls))
        return self.stops


# Python knows only the handlers that it has set. The C library's `struct sigaction` is kept as it
# is; its first field is the address of the handler (0: the default, 1: ignored).
_Handler = ctypes.Array[ctypes.c_char]


def _c_handler(number: int) -> _Handler | None:
    """The handler of a signal in the C library; None where it has none to give."""
    if not hasattr(signal, "pthread_kill"):  # as on Windows
        return None
    handler = ctypes.create_string_buffer(512)  # more than any system has
    ctypes.CDLL(None).sigaction(int(number), None, handler)
    return handler


def _set_c_handler(number: int, handler: _Handler | None) -> None:
    if handler is not None:
        ctypes.CDLL(None).sigaction(int(number), handler, None)


def _is_another_function(handler: _Handler | None, ours: _Handler | None) -> bool:
    """Whether `handler` is a function, and not `ours`."""
    if handler is None or ours is None:
        return False
    address, mine = (
        int.from_bytes(each.raw[: ctypes.sizeof(ctypes.c_void_p)], "little")
        for each in (handler, ours)
    )
    return address > 1 and address != mine
