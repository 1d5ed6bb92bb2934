"""The state of a training as a person sees it: one line, or a panel where there is room."""

import datetime
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.harness.cli import curve
from jaxformer import optional_dependencies

WIDE, HIGH = 100, 24
"""Columns and rows of a terminal that has room for the panel."""


class Sample(NamedTuple):
    """What the model makes of a source, beside what is right."""

    source: str
    model: str
    reference: str


class Thinned:
    """At most `most` numbers in place of many: each of `values` is the mean of equally many."""

    def __init__(self, most: int = 1_024):
        self.values: list[float] = []
        self._most, self._each = most, 1
        self._waiting: list[float] = []

    def add(self, number: float) -> None:
        """Takes one more number; what is not finite is left out."""
        self._waiting += [number] if math.isfinite(number) else []
        if len(self._waiting) < self._each:
            return
        self.values.append(sum(self._waiting) / self._each)
        self._waiting = []
        if len(self.values) == self._most:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values = [(a + b) / 2 for a, b in pairs]
            self._each *= 2


class View(NamedTuple):
    """The last finished step of a training, and what led there."""

    step: int
    total: int
    numbers: str
    left: float | None
    losses: "Thinned"
    best: str = ""
    samples: Sequence[Sample] = ()

    @property
    def line(self) -> str:
        """The state in one line."""
        return f"step {self.step}/{self.total}  {self.numbers}  left {duration(self.left)}"


def has_room(width: int, height: int) -> bool:
    """Whether a terminal of this size shows the panel."""
    return width >= WIDE and height >= HIGH


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, or "-" where they are not known."""
    return "-" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def sample_lines(samples: Sequence[Sample]) -> list[str]:
    """Three lines for each sample."""
    names = "source   ", "  model  ", "  right  "
    return [f"{name} {text}" for one in samples for name, text in zip(names, one, strict=True)]


def render(view: View, width: int, height: int) -> Any:
    """The panel for a terminal of this size, or the line where the terminal is too small."""
    text = optional_dependencies.load("rich.text").Text
    if not has_room(width, height):
        return text(view.line[: width - 1])
    inner = width - 4
    rows = [_bar(view, inner), text("  ".join(filter(None, (view.numbers, view.best))))]
    rows += [text(line, style="cyan") for line in curve(view.losses.values, inner, 5)]
    for line in sample_lines(view.samples):
        rows.append(text(line[:inner], style="green" if line.startswith("  model") else ""))
    group = optional_dependencies.load("rich.console").Group(*rows)
    title = f"step {view.step:,} of {view.total:,}"
    return optional_dependencies.load("rich.panel").Panel(group, title=title, width=width)


def _bar(view: View, width: int) -> Any:
    """How much is done, as a bar with its share and the time left."""
    share = view.step / view.total
    tail = f" {share:4.0%}  left {duration(view.left)}"
    length = width - len(tail)
    done = round(share * length)
    text = optional_dependencies.load("rich.text").Text
    return text.assemble(("━" * done, "cyan"), ("─" * (length - done), "dim"), tail)
