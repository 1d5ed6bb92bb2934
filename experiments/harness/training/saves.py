"""Saves of a training, which goes on where a disk is full for a while."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxformer.checkpoint import Checkpoints

_FAILURES_THAT_END = 3
"""Failed saves in a row that end a run."""


class Saves:
    """Saves to `checkpoints`. A failure is a warning, until the third in a row or the last save."""

    def __init__(self, checkpoints: Checkpoints):
        self._checkpoints = checkpoints
        self._failures: list[OSError] = []

    def save(self, *args: Any, **named: Any) -> None:
        """Calls `Checkpoints.save`."""
        self._surviving(self._settle)
        self._surviving(partial(self._checkpoints.save, *args, **named))

    def annotate(self, *args: Any) -> None:
        """Calls `Checkpoints.annotate`."""
        self._surviving(self._settle)
        self._surviving(partial(self._checkpoints.annotate, *args))

    def end(self) -> None:
        """Returns when all is saved; raises the error of the last save if that has failed."""
        self._settle()
        if self._failures:
            raise self._failures[-1]

    def _settle(self) -> None:
        if self._checkpoints.wait():
            self._failures.clear()

    def _surviving(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._failures.append(error)
            left = _FAILURES_THAT_END - len(self._failures)
            if left <= 0:
                raise
            reason = f"{error.filename}: {error.strerror}" if error.filename else error
            more = f"the next save tries again, and {left} more failures end the run"
            warnings.warn(f"{reason}; {more}", stacklevel=4)
