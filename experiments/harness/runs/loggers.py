"""Receivers of what a training logs: a user's own loggers, and TensorBoard's file of events."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from experiments.harness import cli
from jaxformer import optional_dependencies, storage

_FLUSH_SECONDS = 10.0  # each flush waits for the disk


class Logger(Protocol):
    """Receives each line of metrics.jsonl; a `close()`, if it has one, is called at the end."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the numbers of `step`."""


class Loggers:
    """A user's loggers; the first error of each is a warning, and further ones are silent."""

    def __init__(self, loggers: Iterable[Logger] = ()):
        self._loggers = list(loggers)
        self._warned: set[int] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Gives each logger a copy of `metrics`."""
        self._each(lambda logger: logger.log(step, dict(metrics)))

    def close(self) -> None:
        """Closes the loggers that can be closed."""
        self._each(lambda logger: getattr(logger, "close", lambda: None)())

    def _each(self, call: Callable[[Any], None]) -> None:
        for logger in self._loggers:
            try:
                call(logger)
            except Exception as error:
                if id(logger) not in self._warned:
                    reason = f"{type(logger).__name__} failed: {type(error).__name__}: {error}"
                    cli.say(f"warning: the logger {reason}; training goes on", sys.stderr)
                self._warned.add(id(logger))


class EventFile:
    """A TensorBoard file, written in this thread: tensorboardX hangs if its own thread dies.

    That of a `folder` in a bucket is written here, and replaced there by `flush`.
    """

    def __init__(self, folder: Path, first_step: int):
        writers = optional_dependencies.load("tensorboardX.event_file_writer")
        self._summary = optional_dependencies.load("tensorboardX.summary")
        self._event = optional_dependencies.load("tensorboardX.proto.event_pb2")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._local = tempfile.TemporaryDirectory() if storage.is_in_bucket(folder) else None
        local = Path(self._local.name) if self._local else folder
        self._writer = writers.EventsWriter(str(local / "events"), f".{time.time_ns()}")
        self._flushed = 0.0
        # TensorBoard then hides the events of earlier files from this step on.
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(first_step, session_log=start)

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        for name, number in numbers.items():
            self._write(step, summary=self._summary.scalar(name, number))
        now = time.time()
        if now - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = now

    def add_text(self, step: int, name: str, text: str) -> None:
        """Adds a text, in which TensorBoard shows Markdown."""
        self._write(step, summary=self._summary.text(name, text))

    def flush(self) -> None:
        """Writes the events that wait."""
        self._writer.flush()
        if self._local is not None:
            storage.upload(Path(self._local.name), self._folder)

    def close(self) -> None:
        """Writes the events that wait, and ends the file."""
        self.flush()
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event.Event(wall_time=time.time(), step=step, **content))
