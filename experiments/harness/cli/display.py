"""The screen of a command: named phases with their times, lines, a live area on a terminal.

Elsewhere, as in a log file, there are plain lines, and a phase that lasts says so every 30 seconds.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from experiments.harness.cli.exit_codes import say as print_line
from jaxformer import optional_dependencies


class Phase:
    """A phase that began when this was made, and how far it is."""

    def __init__(self, name: str):
        self.name = name
        self.done = ""
        """What is done, such as ", 7 of 23 MB"."""
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._start

    def encoded(self, size: int, total: int) -> None:
        """Shows that `size` of `total` bytes of text are encoded."""
        self.done = f", {size / 1e6:,.0f} of {total / 1e6:,.0f} MB"


class Screen:
    """Lines on `stream`, and on a terminal with rich a live area below them; NO_COLOR is respected.

    `view` draws what the live area shows above the current phase, from its columns and rows.
    """

    log_interval = 30.0
    """Seconds between two lines about a phase in a log."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self.view: Callable[[int, int], Any] | None = None
        self._phases: list[Phase] = []
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
        """Prints `text`, above the live area; a terminal that is gone is no error."""
        if not self.live:
            print_line(text, self.stream)
            return
        with contextlib.suppress(OSError):
            self._live.refresh()  # of a phase that has just ended
            self._live.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str) -> Iterator["Phase"]:
        """Within it, `name` is what is being done; then the name and its time are printed."""
        phase, ended = Phase(name), threading.Event()
        self._phases.append(phase)
        if not self.live:
            threading.Thread(target=self._repeat, args=(phase, ended), daemon=True).start()
        try:
            yield phase
        finally:
            ended.set()
            self._phases.pop()
        self.say(f"{name}: {phase.seconds:.1f} s")

    def __enter__(self) -> "Screen":
        if self.live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            if self.live:
                self._live.stop()

    def _make_live(self) -> Any:
        console = optional_dependencies.load("rich.console").Console
        self._spinner = optional_dependencies.load("rich.spinner").Spinner("dots")
        stdout = self.stream is sys.stdout
        return optional_dependencies.load("rich.live").Live(
            get_renderable=self._render,
            console=console(file=self.stream, highlight=False),
            refresh_per_second=2,
            transient=True,
            redirect_stdout=stdout,
            redirect_stderr=stdout and sys.stderr.isatty(),
        )

    def _repeat(self, phase: "Phase", ended: threading.Event) -> None:
        """Says how long a phase lasts so far, until it has `ended`."""
        while not ended.wait(self.log_interval):
            print_line(f"{phase.name}: {phase.seconds:.0f} s so far{phase.done}", self.stream)

    def _render(self) -> Any:
        shown = [] if self.view is None else [self.view(*self.size)]
        for phase in self._phases[-1:]:
            text = optional_dependencies.load("rich.text").Text
            said = f"{phase.name} ... {int(phase.seconds)} s{phase.done}"
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
def phase(name: str) -> Iterator[Phase]:
    """Within it, the screen shows `name` as what is being done; then its time is printed."""
    with opened() as screen, screen.phase(name) as phase:
        yield phase


def say(text: str) -> None:
    """Prints `text` on the open screen, or on standard output."""
    _open[-1].say(text) if _open else print_line(text)


def show_cursor() -> None:
    """Shows the cursor, which a live area hides; for a process that ends without leaving it."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        print_line("\x1b[?25h", sys.__stdout__)
