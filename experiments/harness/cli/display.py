"""The screen of a command: named phases with their times, lines, and bars on a terminal.

A log file gets lines alone. After ten silent seconds one says what the command is doing.
"""

import contextlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from jaxformer import optional_dependencies

RULE = "-" * 20
"""The line printed between two texts."""

_LOG_WIDTH = 80
"""Columns of a line in a log that is cut to fit."""
_BAR = 28
"""Columns of a terminal that a bar, its spinner and its time take."""


class Phase:
    """A phase that began when this was made, and how far it is."""

    def __init__(self, name: str, bars: Any = None):
        self.name = name
        self.words: Sequence[str] = (name,)
        self._start, self._bars = time.monotonic(), bars
        self._task = bars.add_task(name, total=None) if bars else None

    @property
    def seconds(self) -> float:
        """The time since its start."""
        return time.monotonic() - self._start

    def show(self, words: Iterable[str], done: float, total: float) -> None:
        """Shows `words`, the first ones where there is no room for all, and done / total as a bar.

        From here on they name the phase.
        """
        self.words = list(words)
        if self._bars:
            text = fitting(self.words, self._bars.console.width - _BAR)
            self._bars.update(self._task, description=text, completed=done, total=total)

    def encoded(self, size: int, total: int) -> None:
        """Shows that `size` of `total` bytes of text are encoded."""
        self.show([self.name, f"{size / 1e6:,.0f} of {total / 1e6:,.0f} MB"], size, total)

    def end(self) -> None:
        """Removes its bar."""
        if self._bars:
            self._bars.remove_task(self._task)


class Screen:
    """Lines on `stream`, and below them on a terminal with rich a bar for each phase.

    NO_COLOR is respected.
    """

    silence = 10.0
    """Seconds without a line after which a log says what is done; each time they double."""

    def __init__(self, stream: TextIO):
        self.stream = stream
        self._phases: list[Phase] = []
        self._bars: Any = None
        self._spoke = threading.Event()
        self._closed = False
        encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
        if stream.isatty() and encoding == "utf8":
            with contextlib.suppress(optional_dependencies.MissingExtra):
                self._bars = _make_bars(stream)

    @property
    def width(self) -> int:
        """The columns of a line that is cut to fit."""
        return self._bars.console.width - 1 if self._bars else _LOG_WIDTH

    def say(self, text: str) -> None:
        """Prints `text`, above the bars; a terminal that is gone is no error."""
        self._spoke.set()
        if not self._bars:
            _print(text, self.stream)
            return
        with contextlib.suppress(OSError):
            self._bars.refresh()  # of a phase that has just ended
            self._bars.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Within it, `name` is what is being done; then the name and its time are printed."""
        phase = Phase(name, self._bars)
        self._phases.append(phase)
        try:
            yield phase
        finally:
            self._phases.remove(phase)
            phase.end()
        self.say(f"{name}: {phase.seconds:.1f} s")

    def __enter__(self) -> "Screen":
        if self._bars:
            self._bars.start()
        else:
            threading.Thread(target=self._break_silence, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._spoke.set()
        with contextlib.suppress(OSError):
            if self._bars:
                self._bars.stop()

    def _break_silence(self) -> None:
        wait = self.silence
        while not self._closed:
            if self._spoke.wait(wait):
                self._spoke.clear()
                wait = self.silence
            elif self._phases:
                phase, wait = self._phases[-1], 2 * wait
                time_so_far = f": {phase.seconds:.0f} s so far"
                words = fitting(phase.words, self.width - len(time_so_far))
                _print(words + time_so_far, self.stream)


def _print(text: str, stream: TextIO) -> None:
    """Prints `text`; a log on a full disk must not stop a training."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)


def wrapped(text: str) -> str:
    """`text` with each line in lines of at most 80 columns, indented from the second on."""
    lines: list[str] = []
    for line in text.splitlines():
        start = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line.lstrip(),
            _LOG_WIDTH,
            initial_indent=start,
            subsequent_indent=f"{start}    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def fitting(words: Iterable[str], width: int) -> str:
    """The first of `words` that fit into a line of `width` columns, at least one."""
    line = ""
    for word in words:
        longer = f"{line}  {word}" if line else word
        if line and len(longer) > width:
            break
        line = longer
    return line


def _make_bars(stream: TextIO) -> Any:
    rich = optional_dependencies.load("rich.progress")
    console = optional_dependencies.load("rich.console").Console
    stdout = stream is sys.stdout
    return rich.Progress(
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(bar_width=16),
        rich.TimeElapsedColumn(),
        console=console(file=stream, highlight=False),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=stdout,
        redirect_stderr=stdout and sys.stderr.isatty(),
    )


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


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Within it, a terminal shows `name` next to the output of a command that has no screen."""
    if _open or not sys.stderr.isatty():
        yield
        return
    with opened(sys.stderr), phase(name):
        yield


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints `text` on the open screen, else on standard output; or on `stream`."""
    if _open and stream is None:
        _open[-1].say(text)
    else:
        _print(text, stream or sys.stdout)


def bold(prompt: str) -> str:
    """`prompt` in bold where standard output is a terminal, so that one sees where it ends."""
    plain = not prompt or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
    return prompt if plain else f"\x1b[1m{prompt}\x1b[0m"


def show_cursor() -> None:
    """Shows the cursor, which a live area hides; for a process that ends without leaving it."""
    if sys.__stdout__ is not None and sys.__stdout__.isatty():
        _print("\x1b[?25h", sys.__stdout__)
