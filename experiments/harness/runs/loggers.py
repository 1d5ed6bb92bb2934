"""Receivers of what a training logs: TensorBoard, and a user's own loggers."""

import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from copy import copy
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
    """Loggers of a run; the first error of each is a warning, and further ones are silent."""

    def __init__(self, loggers: Iterable[Logger] = ()):
        self._loggers = list(loggers)
        self._warned: set[int] = set()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Gives each logger a copy of `metrics`."""
        self.call("log", step, metrics)

    def close(self) -> None:
        """Closes the loggers that can be closed."""
        self.call("close")

    def call(self, method: str, *args: Any) -> None:
        """Calls the `method` of each logger that has it."""
        for logger in self._loggers:
            try:
                getattr(logger, method, lambda *_: None)(*map(copy, args))
            except Exception as error:
                if id(logger) not in self._warned:
                    reason = f"{type(logger).__name__} failed: {type(error).__name__}: {error}"
                    cli.say(f"warning: the logger {reason}; training goes on", sys.stderr)
                self._warned.add(id(logger))


class TensorBoard:
    """A logger of TensorBoard's files, written in this thread: tensorboardX hangs if its own dies.

    The file is opened by the first numbers. That of a `folder` in a bucket is written here, and
    replaced there by `flush`.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None
        self._flushed = 0.0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        self._writer = self._writer or self._open(step)
        for name, number in metrics.items():
            self._write(step, summary=self._summary.scalar(name, number))
        now = time.time()
        if now - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = now

    def log_text(self, step: int, name: str, lines: Iterable[str]) -> None:
        """Adds a text, unless there were no numbers before."""
        if self._writer is not None:  # Markdown shows indented lines as they are
            text = "".join(f"    {line}\n" for line in lines)
            self._write(step, summary=self._summary.text(name, text))

    def flush(self) -> None:
        """Writes the events that wait."""
        if self._writer is not None:
            self._writer.flush()
            if self._local is not None:
                storage.upload(Path(self._local.name), self._folder)

    def close(self) -> None:
        """Writes the events that wait, and ends the file."""
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        writers = optional_dependencies.load("tensorboardX.event_file_writer")
        self._summary = optional_dependencies.load("tensorboardX.summary")
        self._event = optional_dependencies.load("tensorboardX.proto.event_pb2")
        self._folder.mkdir(parents=True, exist_ok=True)
        in_bucket = storage.is_in_bucket(self._folder)
        self._local = tempfile.TemporaryDirectory() if in_bucket else None
        local = Path(self._local.name) if self._local else self._folder
        self._writer = writers.EventsWriter(str(local / "events"), f".{time.time_ns()}")
        # TensorBoard then hides the events of earlier files from this step on.
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(step, session_log=start)
        return self._writer

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event.Event(wall_time=time.time(), step=step, **content))
