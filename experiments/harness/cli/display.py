"""The screen of a command: named phases with their times, lines, a live area on a terminal.

A thread draws, so that a slow or stopped terminal never holds up the work. Elsewhere, as in a log
file, there are plain lines, and a phase that lasts says so every 30 seconds.
"""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from experiments.harness.cli.exit_codes import say as print_line
from jaxformer import optional_dependencies


class Screen:
    """Lines on `stream`, and on a terminal with rich a live area below them; NO_COLOR is respected.

    `view` draws what the live area shows above the current phase, from its columns and rows.
    """

    live_interval = 0.5
    """Seconds between two drawings of the live area."""
    log_interval = 30.0
    """Seconds between two lines about a phase in a log."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.view: Callable[[int, int], Any] | None = None
        self._phases: list[tuple[str, float]] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self._live: Any = None
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
        if stream.isatty() and encoding == "utf8":
            with contextlib.suppress(optional_dependencies.MissingExtra):
                self._live = self._make_live()

    @property
    def live(self) -> bool:
        """Whether there is a live area."""
        return self._live is not None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows of the live area; 0 where there is none."""
        return tuple(self._live.console.size) if self.live else (0, 0)

    def say(self, text: str) -> None:
        """Prints `text`; on a terminal the thread does."""
        if self.live:
            self._lines.put(text)
        else:
            print_line(text, self.stream)

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

    def __enter__(self) -> "Screen":
        if self.live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Prints the lines that wait, unless the terminal has been stopped."""
        self._lines.put(None)
        self._thread.join(timeout=2.0)
        if self.live and not self._thread.is_alive():
            self._live.stop()

    def _make_live(self) -> Any:
        console = optional_dependencies.load("rich.console").Console
        self._spinner = optional_dependencies.load("rich.spinner").Spinner("dots")
        stdout = self.stream is sys.stdout
        return optional_dependencies.load("rich.live").Live(
            get_renderable=self._render,
            console=console(file=self.stream, highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=stdout,
            redirect_stderr=stdout and sys.stderr.isatty(),
        )

    def _run(self) -> None:
        interval = self.live_interval if self.live else self.log_interval
        text: str | None = ""
        while text is not None:
            with contextlib.suppress(OSError):  # the terminal is gone; the work goes on
                try:
                    text = self._lines.get(timeout=interval)
                except queue.Empty:
                    self._draw()
                else:
                    if text:
                        self._live.console.print(text, markup=False, soft_wrap=True)

    def _draw(self) -> None:
        if self.live:
            self._live.refresh()
        elif current := self._current():
            print_line(f"{current[0]}: {current[1]:.0f} s so far", self.stream)

    def _current(self) -> tuple[str, float] | None:
        """The innermost phase and its seconds so far."""
        phases = self._phases[-1:]  # the other thread may end it meanwhile
        return (phases[0][0], time.monotonic() - phases[0][1]) if phases else None

    def _render(self) -> Any:
        shown = [] if self.view is None else [self.view(*self.size)]
        if current := self._current():
            text = optional_dependencies.load("rich.text").Text
            said = f"{current[0]} ... {current[1]:.0f} s"
            self._spinner.update(text=text(said, "bold", no_wrap=True, overflow="ellipsis"))
            shown.append(self._spinner)
        return optional_dependencies.load("rich.console").Group(*shown)


_open: list[Screen] = []


@contextmanager
def opened(stream: TextIO | None = None) -> Iterator[Screen]:
    """The process's screen, on `stream` or standard output; the open one where there is one."""
    if _open:
        yield _open[-1]
        return
    with Screen(stream or sys.stdout) as screen:
        _open.append(screen)
        try:
            yield screen
        finally:
            _open.remove(screen)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Within it, the screen shows `name` as what is being done; then its time is printed."""
    with opened() as screen, screen.phase(name):
        yield


def say(text: str) -> None:
    """Prints `text` on the open screen, or on standard output."""
    _open[-1].say(text) if _open else print_line(text)


def show_cursor() -> None:
    """Shows the cursor, which a live area hides; for a process that ends without leaving it."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        print_line("\x1b[?25h", sys.__stdout__)
