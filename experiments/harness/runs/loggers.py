"""A user's own loggers, which get what a training logs and cannot end it."""

import sys
from collections.abc import Iterable, Mapping
from typing import Protocol

from experiments.harness import cli


class Logger(Protocol):
    """What gets each line of metrics.jsonl; a `close()`, if it has one, is called at the end."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the numbers of `step`."""


class Loggers:
    """Several loggers; the first error of each is a warning, and further ones are silent."""

    def __init__(self, loggers: Iterable[Logger] = ()):
        self._loggers = list(loggers)
        self._warned: set[int] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Gives each logger a copy of `metrics`."""
        for logger in self._loggers:
            try:
                logger.log(step, dict(metrics))
            except Exception as error:
                self._warn(logger, error)

    def close(self) -> None:
        """Closes the loggers that can be closed."""
        for logger in self._loggers:
            try:
                getattr(logger, "close", lambda: None)()
            except Exception as error:
                self._warn(logger, error)

    def _warn(self, logger: Logger, error: Exception) -> None:
        if id(logger) not in self._warned:
            said = f"the logger {type(logger).__name__} failed: {type(error).__name__}: {error}"
            cli.say(f"warning: {said}; training goes on", sys.stderr)
        self._warned.add(id(logger))
