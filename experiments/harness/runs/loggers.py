"""Receivers of what a training logs: metrics.jsonl, TensorBoard, and a user's own loggers."""

import errno
import json
import math
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from experiments.harness.cli import display
from jaxformer import optional_dependencies, storage

_DISK_SECONDS, _BUCKET_SECONDS = 10.0, 60.0
"""Between two writes of what waits: each waits for the disk, or sends the whole file."""


class Logger(Protocol):
    """Receives what a run logs.

    If it has them, `begin(step)` is called before the first step, whose number is `step`, so that
    no step waits for what takes long; `flush()` when a checkpoint is saved; `close()` at the end.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the numbers of `step`."""


class MetricsFile:
    """The logger of metrics.jsonl in a run's folder: a JSON line for each step.

    A line is on disk when `log` returns. In a bucket, where nothing can be appended, the file is
    replaced by `flush`, and by `log` at most once a minute.
    """

    def __init__(self, folder: Path):
        self._path = folder / "metrics.jsonl"
        self._in_bucket = storage.is_in_bucket(folder)
        self._content = b""  # of the file in a bucket
        self._flushed = time.monotonic()
        self._torn = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line; a number that is not finite is null, as JSON has no other word for it."""
        finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        line = (json.dumps({"step": step, **finite}) + "\n").encode()
        if self._in_bucket:
            self._content += line
            if time.monotonic() - self._flushed > _BUCKET_SECONDS:
                self.flush()
            return
        if self._torn:  # the last line was cut off: end it first
            line = b"\n" + line
        self._torn = True  # until this one is whole
        # Unbuffered: what a full disk refused must not be written with the next line.
        with self._path.open("ab", buffering=0) as file:
            written = file.write(line)
        if written != len(line):
            reason = f"only {written} of {len(line)} bytes were written"
            raise OSError(errno.ENOSPC, reason, str(self._path))
        self._torn = False

    def flush(self) -> None:
        """Writes to a bucket what was logged: call it before a checkpoint that stands on it."""
        self._flushed = time.monotonic()
        if self._in_bucket and self._content:
            self._path.write_bytes(self._content)

    def close(self) -> None:
        """Writes what waits."""
        self.flush()

    def resume(self, step: int, without: str | None) -> None:
        """Removes the lines after `step`, lines of `step` with the metric `without`, damaged lines.

        Warns of a damaged line, unless it is the last one, which a crash may leave half written.
        """
        whole = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []
        wrong = [n for n, line in enumerate(whole, 1) if line and _parse(line) is None]
        if wrong:
            numbers = ", ".join(map(str, wrong))
            display.say(f"warning: {self._path} lines {numbers}: no metrics, left out", sys.stderr)
        last = step if without is None else step - 1
        lines = [x for x in self._lines() if x["step"] <= (last if without in x else step)]
        self._content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        if self._path.exists():
            storage.write(self._path, self._content)

    def read(self) -> list[dict]:
        """The lines in order, without damaged ones and numbers that are not finite."""
        lines = self._lines()
        return [{name: x for name, x in line.items() if x is not None} for line in lines]

    def _lines(self) -> list[dict]:
        if not self._path.exists():
            return []
        lines = map(_parse, self._path.read_bytes().split(b"\n"))
        return [line for line in lines if line is not None]


def _parse(line: bytes) -> dict | None:
    try:
        numbers = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return numbers if isinstance(numbers, dict) and type(numbers.get("step")) is int else None


class TensorBoard:
    """A logger of TensorBoard's files, written in this thread: tensorboardX hangs if its own dies.

    The file is opened by `begin`, or by the first numbers. In a bucket, `flush` replaces it by a
    file that is written on this machine.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None
        self._local: Any = None  # the folder of the file of one in a bucket
        self._flushed = time.monotonic()

    def begin(self, step: int) -> None:
        """Loads the library, which takes seconds, and opens the file."""
        if self._writer is None:
            self._open(step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to each curve."""
        self.begin(step)
        for name, number in metrics.items():
            self._write(step, summary=self._summary.scalar(name, number))
        if time.monotonic() - self._flushed > (_BUCKET_SECONDS if self._local else _DISK_SECONDS):
            self.flush()

    def log_text(self, step: int, name: str, lines: Iterable[str]) -> None:
        """Adds a text, unless there were no numbers before."""
        if self._writer is not None:  # Markdown shows indented lines as they are
            text = "".join(f"    {line}\n" for line in lines)
            self._write(step, summary=self._summary.text(name, text))

    def flush(self) -> None:
        """Writes the events that wait."""
        self._flushed = time.monotonic()
        if self._writer is not None:
            self._writer.flush()
            if self._local is not None:
                storage.upload(Path(self._local.name), self._folder)

    def close(self) -> None:
        """Writes the events that wait, and ends the file."""
        self.flush()
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> None:
        """Begins a file, in which TensorBoard finds the points from `step` on."""
        self._summary = optional_dependencies.load("tensorboardX.summary")
        self._event = optional_dependencies.load("tensorboardX.proto.event_pb2")
        self._folder.mkdir(parents=True, exist_ok=True)
        local = self._folder
        if storage.is_in_bucket(self._folder):
            self._local = tempfile.TemporaryDirectory()
            local = Path(self._local.name)
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9}.{socket.gethostname()}.{now}"
        self._writer = optional_dependencies.load("tensorboardX").RecordWriter(str(local / name))
        self._write(0, file_version="brain.Event:2")
        # TensorBoard then hides the events of earlier files from this step on.
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(step, session_log=start)

    def _write(self, step: int, **content: Any) -> None:
        event = self._event.Event(wall_time=time.time(), step=step, **content)
        self._writer.write(event.SerializeToString())
