"""The events that TensorBoard shows: numbers, texts and pictures of a training."""

import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer import optional_dependencies

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SECONDS = 10.0
"""Between two flushes, because each waits for the disk."""
_DPI = 80


class EventFile:
    """A TensorBoard file, written in this thread: tensorboardX hangs if its own thread dies."""

    def __init__(self, folder: Path, first_step: int):
        writers = optional_dependencies.load("tensorboardX.event_file_writer")
        self._summary = optional_dependencies.load("tensorboardX.summary")
        self._event = optional_dependencies.load("tensorboardX.proto.event_pb2")
        self._proto = optional_dependencies.load("tensorboardX.proto.summary_pb2")
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = writers.EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._flushed = 0.0
        # TensorBoard then hides the events of earlier files from this step on.
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(first_step, session_log=start)

    def add_numbers(self, step: int, numbers: Mapping[str, float]) -> None:
        """A point of each curve."""
        for name, number in numbers.items():
            self._write(step, summary=self._summary.scalar(name, number))
        now = time.time()
        if now - self._flushed > _SECONDS:
            self._writer.flush()
            self._flushed = now

    def add_text(self, step: int, name: str, text: str) -> None:
        """A text, in which TensorBoard shows Markdown."""
        self._write(step, summary=self._summary.text(name, text))

    def add_picture(self, step: int, name: str, figure: "Figure") -> None:
        """A matplotlib figure, as a PNG file."""
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=_DPI)
        size = [int(inches * _DPI) for inches in figure.get_size_inches()]
        png = file.getvalue()
        image = self._proto.Summary.Image(
            width=size[0], height=size[1], colorspace=4, encoded_image_string=png
        )
        value = self._proto.Summary.Value(tag=name, image=image)
        self._write(step, summary=self._proto.Summary(value=[value]))

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event.Event(wall_time=time.time(), step=step, **content))
