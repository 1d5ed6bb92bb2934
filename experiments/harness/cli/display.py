"""What a person sees while a command works: named phases with their times, lines, a live area.

On a terminal a live area at the bottom shows what is being done. A thread draws it, so that a slow
or stopped terminal never holds up the work. Elsewhere, as in a log file, there are plain lines.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from experiments.harness import cli
from jaxformer import optional_dependencies


class Screen:
    """Plain lines; a phase that lasts tells so every 30 seconds."""

    interval = 30.0
    """Seconds between two calls of `_draw`."""
    live = False
    """Whether there is a live area."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.view: Callable[[int, int], Any] | None = None
        self._phases: list[tuple[str, float]] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of the live area; 0 where there is none."""
        return 0, 0

    def say(self, text: str) -> None:
        """Prints `text`."""
        cli.say(text, self.stream)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within it, `name` is what is being done; then the name and its time are printed."""
        start = time.monotonic()
        self._phases.append((name, start))
        try:
            yield
        finally:
            self._phases.pop()
        self.say(f"{name}: {time.monotonic() - start:.1f} s")

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Prints what is waiting and ends the thread, unless the terminal has been stopped."""
        self._queue.put(None)
        self._thread.join(timeout=2.0)

    def current(self) -> tuple[str, float] | None:
        """The innermost phase and its seconds so far."""
        phases = self._phases[-1:]  # the other thread may end it meanwhile
        return (phases[0][0], time.monotonic() - phases[0][1]) if phases else None

    def _run(self) -> None:
        text: str | None = ""
        while text is not None:
            try:
                text = self._queue.get(timeout=self.interval)
            except queue.Empty:
                text = ""
            self._draw(text)

    def _draw(self, text: str | None) -> None:
        """Prints `text` and the state; None is the end."""
        current = self.current()
        if text is not None and current is not None:
            cli.say(f"{current[0]}: {current[1]:.0f} s so far", self.stream)


class Terminal(Screen):
    """A live area at the bottom of a terminal, drawn with rich. NO_COLOR is respected."""

    interval = 0.5
    live = True

    def __init__(self, stream: TextIO):
        super().__init__(stream)
        console = optional_dependencies.load("rich.console").Console(file=stream, highlight=False)
        self.console = console
        self._live = optional_dependencies.load("rich.live").Live(
            get_renderable=self._render,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=stream is sys.stdout and sys.stderr.isatty(),
        )

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of the terminal."""
        return tuple(self.console.size)

    def say(self, text: str) -> None:
        """Has the thread print `text` above the live area."""
        self._queue.put(text)

    def start(self) -> None:
        """Starts the live area and its thread."""
        self._live.start()
        super().start()

    def close(self) -> None:
        """Prints what is waiting and removes the live area."""
        super().close()
        if not self._thread.is_alive():
            self._live.stop()

    def _draw(self, text: str | None) -> None:
        try:
            if text:
                self.console.print(text, markup=False, soft_wrap=True)
            else:
                self._live.refresh()
        except OSError:  # the terminal is gone; the work goes on
            pass

    def _render(self) -> Any:
        width, height = self.size
        group = optional_dependencies.load("rich.console").Group
        shown = [] if self.view is None else [self.view(width, height)]
        current = self.current()
        if current is not None:
            shown.append(_phase_line(*current, width))
        return group(*shown)


_open: list[Screen] = []


@contextmanager
def opened(stream: TextIO | None = None) -> Iterator[Screen]:
    """The process's screen: a `Terminal` where `stream` is one and rich is installed.

    Within an open screen it is that one. `stream` is standard output by default.
    """
    if _open:
        yield _open[-1]
        return
    screen = _choose(stream or sys.stdout)
    screen.start()
    _open.append(screen)
    try:
        yield screen
    finally:
        _open.remove(screen)
        screen.close()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Within it, the screen shows `name` as what is being done; then its time is printed."""
    with opened() as screen, screen.phase(name):
        yield


def say(text: str) -> None:
    """Prints `text` on the open screen, or on standard output."""
    _open[-1].say(text) if _open else cli.say(text)


def show_cursor() -> None:
    """Shows the cursor, which a live area hides; for a process that ends without leaving it."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        cli.say("\x1b[?25h", sys.__stdout__)


def _choose(stream: TextIO) -> Screen:
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    if stream.isatty() and encoding == "utf8":
        try:
            return Terminal(stream)
        except optional_dependencies.MissingExtra:
            pass
    return Screen(stream)


def _phase_line(name: str, seconds: float, width: int) -> Any:
    """A phase that is going on, as a line with a sign that moves."""
    sign = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"[int(2 * seconds) % 10]
    text = optional_dependencies.load("rich.text").Text
    return text(f"{sign} {name} ... {seconds:.0f} s"[:width], style="bold")
