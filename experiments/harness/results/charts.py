"""Charts of a page: curves as SVG paths, with the ticks of their axes and the values to hover."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.harness.results import statistics
from experiments.harness.results.plots import Curve, aligned
from jaxformer import optional_dependencies

LEFT, RIGHT, TOP, BOTTOM = 56, 470, 10, 214
"""The edges of the axes in a chart of 480 x 250, as page.html draws them."""
COLORS = 6
"""Colours of the page; later curves have them again, with dashes."""
_DOTS = 20
"""A curve of fewer points has a dot at each: a single one draws no line."""
_POINTS = 400
"""Points of all curves of a chart; curves with more are thinned."""
_LOG_RANGE = 10.0
"""A positive curve that spans more than this factor has a logarithmic axis, where one helps."""


class Quantity(NamedTuple):
    """The words for a logged number: value times `scale` is in `unit`."""

    label: str
    unit: str = ""
    scale: float = 1.0
    log: bool = False
    """Whether a logarithmic axis helps."""


_QUANTITIES = {
    "loss": Quantity("loss", "nats per token", log=True),
    "bleu": Quantity("BLEU"),
    "chrf": Quantity("chrF"),
    "exact": Quantity("exact", "%", 100.0),
    "accuracy": Quantity("accuracy", "%", 100.0),
    "bits_per_byte": Quantity("bits per byte"),
    "perplexity": Quantity("perplexity", "per token", log=True),
    "word_perplexity": Quantity("word perplexity", "per word", log=True),
    "learning_rate": Quantity("learning rate"),
    "grad_norm": Quantity("gradient norm", log=True),
    "padding": Quantity("padding", "% of positions", 100.0),
    "tokens_per_second": Quantity("speed", "tokens/s"),
    "data_wait": Quantity("wait for a batch", "ms", 1e3),
    "mfu": Quantity("MFU", "% of peak FLOP/s", 100.0),
    "memory": Quantity("memory in use", "GB", 1e-9),
    "memory_peak": Quantity("most memory in use", "GB", 1e-9),
}


def quantity(metric: str) -> Quantity:
    """The words for `metric`, the name of a number in metrics.jsonl or scores.json."""
    validation, name = "validation_", metric.removeprefix("validation_")
    prefix, dot, last = name.rpartition(".")
    known = _QUANTITIES.get(last, Quantity(last.replace("_", " ")))
    words = [validation.strip("_")] if metric.startswith(validation) else []
    words += [prefix.replace("_", " ")] if dot else []
    return known._replace(label=" ".join([*words, known.label]))


class Tick(NamedTuple):
    """A mark of an axis: its place in the chart, and its number."""

    at: float
    text: str


class Line(NamedTuple):
    """A curve as the points of an SVG polyline."""

    name: str
    style: str
    """Classes of the page: a colour s0 to s5, and "dashed" for curves after those."""
    points: str
    band: str
    """The polygon from the least to the largest of the runs; "" for a single run."""
    dots: list[tuple[float, float]]
    """The points of a curve that has few."""


class Chart(NamedTuple):
    """Curves over the steps of training."""

    title: str
    unit: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[Line]
    hover: dict[str, Any]
    """`at`: places of the steps on the x axis; `steps`: their texts; `values`: one for each line
    and step, "" where the line has none."""

    @property
    def last(self) -> list[str]:
        """The last value of each line."""
        return [next(filter(None, reversed(values))) for values in self.hover["values"]]


class Range(NamedTuple):
    """A value and its interval, as places from 0 to 100 on one scale for all."""

    name: str
    style: str
    text: str
    at: float
    low: float
    width: float


def ranges(kind: Quantity, values: Mapping[str, tuple[float, float]]) -> list[Range]:
    """The ranges of `values`, each with half of its interval (NaN where it is not known)."""
    means, halves = kind.scale * np.array(list(values.values())).T
    edges = means + np.nan_to_num(halves) * np.array([[-1.0], [0.0], [1.0]])
    place, _ = _axis(edges, 0.0, 100.0)
    lows, at, highs = place(edges).tolist()
    texts = map(statistics.rounded, means.tolist(), halves.tolist())
    return [
        Range(name, _style(number), text, middle, low, round(high - low, 1))
        for number, (name, text, middle, low, high) in enumerate(
            zip(values, texts, at, lows, highs, strict=True)
        )
    ]


def chart(kind: Quantity, curves: Mapping[str, Sequence[Curve]]) -> Chart:
    """The chart of `curves`: for each name those of runs that differ in the seed alone.

    A line is their mean, its band reaches from the least to the largest.
    """
    most = max(_DOTS, _POINTS // len(curves))
    data = {name: _thinned(*aligned(runs), most) for name, runs in curves.items()}
    data = {name: (steps, kind.scale * values) for name, (steps, values) in data.items()}
    numbers = np.concatenate([values.ravel() for _, values in data.values()])
    log = kind.log and numbers.min() > 0.0 and numbers.max() > _LOG_RANGE * numbers.min()
    every_step = np.unique(np.concatenate([steps for steps, _ in data.values()]))
    x, x_ticks = _axis(np.append(every_step, 0), LEFT, RIGHT, margin=0.0)
    y, y_ticks = _axis(numbers, BOTTOM, TOP, log=log)
    lines, values = [], []
    for number, (name, (steps, runs)) in enumerate(data.items()):
        at, mean = x(steps), runs.mean(axis=0)
        dots = list(zip(at.tolist(), y(mean).tolist(), strict=True)) if len(at) < _DOTS else []
        band = _points(at, y(runs.max(axis=0))) + _points(at[::-1], y(runs.min(axis=0)[::-1]))
        band = band if len(runs) > 1 else ""
        label = f"{name} ({len(runs)} seeds)" if len(runs) > 1 else name
        lines.append(Line(label, _style(number), _points(at, y(mean)), band, dots))
        texts = dict(zip(steps.tolist(), map(shown, mean.tolist()), strict=True))
        values.append([texts.get(step, "") for step in every_step.tolist()])
    labels = [f"{step:,}" for step in every_step.tolist()]
    hover = {"at": x(every_step).tolist(), "steps": labels, "values": values}
    unit = ", ".join(filter(None, (kind.unit, "log scale" if log else "")))
    return Chart(kind.label, unit, x_ticks, y_ticks, lines, hover)


def shown(value: float) -> str:
    """`value` with four significant digits: 16,140, 0.004240, 6e-05."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _style(number: int) -> str:
    return f"s{number % COLORS}{' dashed' * (number >= COLORS)}"


def _thinned(
    steps: np.ndarray, values: Float[np.ndarray, "runs steps"], most: int
) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` of the steps, evenly spaced, with the last one."""
    kept = np.arange(len(steps))[:: -max(1, -(-len(steps) // most))][::-1]
    return steps[kept], values[:, kept]


def _axis(
    values: np.ndarray, start: float, end: float, *, log: bool = False, margin: float = 0.05
) -> tuple[Callable[[np.ndarray], np.ndarray], list[Tick]]:
    """The function from values to places between `start` and `end`, and the ticks of the axis."""
    ticker: Any = optional_dependencies.load("matplotlib.ticker")
    scale = np.log10 if log else np.asarray
    low, high = values.min(), values.max()
    if low == high:
        low, high = low - abs(low) / 10, high + (abs(high) / 10 or 1.0)
    edges = scale(np.array([low, high]))
    first, last = edges + margin * (edges[1] - edges[0]) * np.array([-1, 1])

    def place(numbers: np.ndarray) -> np.ndarray:
        return np.round(start + (scale(numbers) - first) / (last - first) * (end - start), 1)

    decades = last - first
    locator = (
        ticker.LogLocator(subs=(1.0, 2.0, 5.0) if decades < 2.5 else (1.0,), numticks=12)
        if log
        else ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    )
    ticks = np.asarray(locator.tick_values(low, high))
    ticks = ticks[(scale(ticks) >= first - 1e-9) & (scale(ticks) <= last + 1e-9)]
    texts = map(shown, np.where(np.abs(ticks) < 1e-12, 0.0, ticks).tolist())
    return place, [Tick(*tick) for tick in zip(place(ticks).tolist(), texts, strict=True)]


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{a:g},{b:g}" for a, b in zip(x.tolist(), y.tolist(), strict=True)) + " "
