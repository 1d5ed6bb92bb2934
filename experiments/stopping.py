"""Stopping a training run between two steps when the system or the user asks for it."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Within it, the first SIGTERM or SIGINT only makes the yielded function true.

    The loop then saves and leaves, and the process ends with code 143 or 130. A second signal
    ends it at once. The previous handlers come back on leaving.
    """
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        if asked:
            raise SystemExit(128 + number)
        asked.append(number)
        name = signal.Signals(number).name
        print(f"{name}: saving after this step; once more to stop at once", file=sys.stderr)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if asked:
        raise SystemExit(128 + asked[0])
