"""Figures of arrays (matplotlib, extra `experiments`): for pages and `runs plot`.

A curve of a name has one colour and dash in all figures that get the same `Styles`.
"""

import html
import io
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.harness.results.groups import Group
from experiments.harness.runs import rounding
from experiments.harness.runs.loggers import MetricsFile
from experiments.harness.runs.quantities import described, quantity
from experiments.harness.runs.rounding import shown
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[Sequence[float], Sequence[float]]
"""Steps and values."""
Curves = dict[str, dict[str, list[Curve]]]
"""The curves of each metric and group; curves of one group differ in the seed."""
Styles = Mapping[str, tuple[str, str]]
"""The colour and dash of each name."""

COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8578f", "#2a8fc4", "#b57a00")
"""Colours after Okabe and Ito, which people with colour blindness can tell apart."""
DASHES = ("-", "--", "-.", ":")
INK, GRID = "#5c5c5c", "#d5d5d5"
"""The colours of texts and of lines that are no curves."""
_POINTS = 300
"""Points of all curves of a panel; curves with more are thinned."""
_DOTS = 20
"""A curve of fewer points has a dot at each."""
_LONGEST = 50
"""Characters of a name in a figure."""
_LONGEST_WITH_SCORE = 30
"""Characters of a name that stands in one line with its score."""
_LOG_RANGE = 10.0
"""A positive curve that spans more than this factor has a logarithmic axis, where one helps."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxformer",  # the same figure has the same text
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    **dict.fromkeys(("axes.edgecolor", "lines.color"), GRID),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


_SHORTER = (
    (r"(?s)^.*?(?=<svg)|<style.*?</style>", ""),
    (r' xmlns(:\w+)?="[^"]*"| (width|height)="[\d.]+pt"| version="1.1"', ""),
    (r' id="[\w.]+_\d+"| transform="rotate\(-0 [^"]*"|font-family: [^;"]*;? ?', ""),
    (r"(\d\.\d)\d+(?=[^<>]*>)", r"\1"),
    (r'<path d="[^"]*" style="fill: none"/>', ""),
    (r"\s*\n\s*", " "),
    (r"<(g|defs)> *</\1>|<g/>", ""),
)
"""Parts of matplotlib's SVG that a page does not need, and their replacements."""


def styles(names: Iterable[str]) -> Styles:
    """A colour for each name, and another dash where the colours are used up."""
    pairs = itertools.cycle(itertools.product(DASHES, COLORS))
    return {name: (color, dash) for name, (dash, color) in zip(names, pairs, strict=False)}


def logged_curves(groups: Iterable[Group]) -> Curves:
    """The curves of all numbers that the runs of `groups` have logged, without curves of zeros.

    A curve may have a single point.
    """
    curves: Curves = {}
    for group in groups:
        for folder in group.folders:
            lines = MetricsFile(folder).read()
            for metric in dict.fromkeys(name for line in lines for name in line if name != "step"):
                points = [(line["step"], line[metric]) for line in lines if metric in line]
                steps, values = zip(*points, strict=True)
                if any(values):
                    curves.setdefault(metric, {}).setdefault(group.name, []).append((steps, values))
    return curves


def aligned(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all `curves` have, and their values there, a row for each curve."""
    tables = [dict(zip(*curve, strict=True)) for curve in curves]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    return np.array(steps), np.array([[table[step] for step in steps] for table in tables])


class Panel(NamedTuple):
    """The curves of a metric that are drawn in one pair of axes."""

    metric: str
    named: Mapping[str, Sequence[Curve]]
    """Curves by the name of their group; curves of one name belong to runs that differ in the seed.
    """
    tokens: str = ""
    """The letter of the tokens that a loss is a mean over; "" where all runs have the same."""

    @property
    def label(self) -> str:
        """The name of the panel, such as "loss by step"."""
        return f"{self.metric}{f' of tokens {self.tokens}' if self.tokens else ''} by step"


def panels_of(
    curves: Mapping[str, Mapping[str, Sequence[Curve]]], letters: Mapping[str, str]
) -> list[Panel]:
    """A panel for each metric, and for a loss per token one for each of the `letters` of groups.

    The letters are `letters_of_tokens`: a token of one vocabulary is more text than of another.
    """
    panels = []
    for metric, named in curves.items():
        if letters and quantity(metric).unit.endswith("per token"):
            for letter in sorted({letters.get(name, "") for name in named}):
                of_letter = {x: y for x, y in named.items() if letters.get(x, "") == letter}
                panels.append(Panel(metric, of_letter, letter))
        else:
            panels.append(Panel(metric, named))
    return panels


def describe_letters(letters: Mapping[str, str]) -> str:
    """The groups of each of the `letters` of tokens, in a sentence; "" where there are none."""
    if not letters:
        return ""
    names = {
        letter: " and ".join(name for name, other in letters.items() if other == letter)
        for letter in sorted(set(letters.values()))
    }
    each = "; ".join(f"tokens {letter}: {text}" for letter, text in names.items())
    return f"Losses per token are compared only where the tokens are the same. {each}"


def learning_curves(
    curves: Mapping[str, Mapping[str, Sequence[Curve]]], letters: Mapping[str, str] | None = None
) -> "Figure":
    """The panels of `panels_of`; `curves[metric][name]` belong to runs that differ in the seed."""
    panels = panels_of(curves, letters or {})
    count, columns = len(panels), min(len(panels), 2)
    rows = -(-count // columns)
    names = dict.fromkeys(name for named in curves.values() for name in named)
    with _styled():
        figure = _figure(4.6 * columns, 2.6 * rows + 0.4)
        all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(all_axes, panels, strict=False):
            draw_curves(axes, panel, styles(names))
        for axes in all_axes[count:]:
            axes.remove()
        lines = {line.get_label(): line for axes in all_axes[:count] for line in axes.lines}
        lines = {label: line for label, line in lines.items() if label[:1] not in ("", "_")}
        if lines:
            figure.legend(handles=[*lines.values()], loc="outside lower center", ncols=3)
    return figure


def curve_figure(panel: Panel, style: Styles) -> "Figure":
    """The curves of one panel, without a legend."""
    with _styled():
        figure = _figure(4.6, 2.6)
        draw_curves(figure.subplots(), panel, style)
    return figure


def draw_curves(axes: "Axes", panel: Panel, style: Styles) -> None:
    """Draws the curves of a panel with the unit of its metric.

    The curves of one name are drawn as their mean at the steps that all have, with a band from the
    least to the largest value; or as a line each where there is no such step.
    """
    kind = quantity(panel.metric)
    extremes = []
    for name, runs in panel.named.items():
        color, dash = style[name]
        label = f"{name} ({len(runs)} runs)" if len(runs) > 1 else name
        have_common_steps = len(aligned(runs)[0]) > 0
        parts = [runs] if have_common_steps else [[run] for run in runs]
        for part in parts:
            steps, values = _thinned(*aligned(part), max(_DOTS, _POINTS // len(panel.named)))
            values = kind.scale * values
            marker = "." if len(steps) < _DOTS else ""  # one point alone draws no line
            axes.plot(steps, values.mean(axis=0), dash, color=color, marker=marker, label=label)
            if len(part) > 1:
                band = values.min(axis=0), values.max(axis=0)
                axes.fill_between(steps, *band, color=color, alpha=0.2, linewidth=0)
            extremes += [values.min(), values.max()]
    log = kind.log and 0.0 < _LOG_RANGE * min(extremes) < max(extremes)
    _numbers(axes.xaxis, axes.set_xscale, False)
    _numbers(axes.yaxis, axes.set_yscale, log)
    tokens = f"tokens {panel.tokens}" if panel.tokens else ""
    unit = ", ".join(filter(None, (kind.unit, tokens, "log scale" if log else "")))
    axes.set_title(f"{kind.label} ({unit})" if unit else kind.label, loc="left")
    axes.set_xlabel("step", loc="right")
    axes.grid(linewidth=0.5)


class Interval(NamedTuple):
    """Scores of runs that differ in the seed, and half of the interval of their mean, or NaN."""

    name: str
    scores: Sequence[float]
    half: float

    @property
    def mean(self) -> float:
        """The mean of the scores."""
        return float(np.mean(self.scores))


def best_first(metric: str, intervals: Iterable[Interval]) -> list[Interval]:
    """`intervals` by their mean; as they are for a metric that may be neither low nor high."""
    sign = {"lower": 1.0, "higher": -1.0}.get(quantity(metric).better, 0.0)
    return sorted(intervals, key=lambda each: sign * each.mean)


def best_of(metric: str, intervals: Iterable[Interval]) -> Interval | None:
    """The interval with the best mean; None for a tie, and where there is nothing to compare."""
    ordered = best_first(metric, intervals)
    if len(ordered) < 2 or not quantity(metric).better or ordered[0].mean == ordered[1].mean:
        return None
    return ordered[0]


def score_strip(metric: str, intervals: Sequence[Interval], style: Styles) -> "Figure":
    """The intervals on one axis, the best first and marked, with a small mark for each seed."""
    kind, ordered = quantity(metric), best_first(metric, intervals)
    best = best_of(metric, intervals)
    with _styled():
        figure = _figure(4.6, 0.8 + 0.5 * len(ordered))
        axes = figure.subplots()
        for row, each in enumerate(ordered):
            name, scores, half = each
            color, values = style[name][0], kind.scale * np.array(scores)
            mean, half = float(values.mean()), kind.scale * half
            axes.errorbar(mean, -row, xerr=np.nan_to_num(half), fmt="o", color=color, capsize=3)
            axes.plot(values, [-row] * len(values), "|", color=color)
            short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
            score = rounding.rounded(mean, half)
            if each is best:
                score += ", best mean"
            label = (
                f"{short}: {score}" if len(short) <= _LONGEST_WITH_SCORE else f"{short}\n{score}"
            )
            text = axes.annotate(
                label,
                (0.0, -row),
                (0, 7),
                ("axes fraction", "data"),
                textcoords="offset points",
                weight="bold" if each is best else "normal",
            )
            text.set_in_layout(False)  # else it would make the axes narrow
        _numbers(axes.xaxis, axes.set_xscale, False)
        axes.set(yticks=[], ylim=(0.4 - len(ordered), 0.8))
        axes.spines["left"].set_visible(False)
        axes.set_xlabel(described(metric))
        axes.grid(axis="x", linewidth=0.5)
    return figure


def score_by_value(
    metric: str, setting: str, lines: Mapping[str, Sequence[tuple[float, Interval]]]
) -> "Figure":
    """The score against the value of a setting; a line for each name, of the other settings."""
    kind = quantity(metric)
    xs = [x for points in lines.values() for x, _ in points]
    with _styled():
        figure = _figure(4.6, 2.6)
        axes = figure.subplots()
        for name, points in lines.items():
            x, intervals = zip(*sorted(points), strict=True)
            halves = [kind.scale * np.nan_to_num(each.half) for each in intervals]
            means = [kind.scale * each.mean for each in intervals]
            color, dash = (INK, "-") if len(lines) == 1 else styles(lines)[name]
            axes.errorbar(x, means, halves, fmt=f"o{dash}", color=color, capsize=3, label=name)
        _numbers(axes.xaxis, axes.set_xscale, 0.0 < 8.0 * min(xs) <= max(xs))
        _numbers(axes.yaxis, axes.set_yscale, False)
        axes.set_xticks(sorted(set(xs)), [shown(x) for x in sorted(set(xs))])
        axes.set_title(described(metric), loc="left")
        axes.set_xlabel(setting)
        axes.grid(linewidth=0.5)
        if len(lines) > 1:
            axes.legend()
    return figure


def check_format(output: str) -> None:
    """Raises `ConfigError` for a file of pictures whose ending names no format."""
    ending = Path(output).suffix[1:]
    known = _figure(1.0, 1.0).canvas.get_supported_filetypes()
    if ending not in known:
        raise ConfigError(f"output={output!r} must end in one of .{', .'.join(sorted(known))}")


def svg(figure: "Figure", label: str) -> str:
    """`figure` as an element of a page, whose style sheet has its colours as --c0, --soft, --line.

    Coordinates have one decimal; nothing in it is fetched. `label` is for who does not see it.
    """
    out, metadata = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _styled():
        figure.savefig(out, format="svg", metadata=metadata, transparent=True)
    text = out.getvalue()
    for pattern, by in _SHORTER:
        text = re.sub(pattern, by, text)
    colors = {color: f"--c{number}" for number, color in enumerate(COLORS)}
    for color, name in {**colors, INK: "--soft", GRID: "--line"}.items():
        text = text.replace(color, f"var({name})")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _thinned(
    steps: np.ndarray, values: Float[np.ndarray, "runs steps"], most: int
) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` of the steps, evenly spaced, with the last one."""
    kept = np.arange(len(steps))[:: -max(1, -(-len(steps) // most))][::-1]
    return steps[kept], values[:, kept]


def _numbers(axis: Any, set_scale: Callable[[str], None], log: bool) -> None:
    """Gives an axis round ticks, which `shown` writes."""
    ticker: Any = optional_dependencies.load("matplotlib.ticker")
    set_scale("log" if log else "linear")
    low, high = sorted(axis.get_view_interval())
    locator = ticker.MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])
    if log and high > 300.0 * low:
        locator = ticker.LogLocator(subs=(1.0,), numticks=12)
    elif log:
        locator = ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12)
    axis.set_major_locator(locator)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(lambda value, _: shown(0.0 if abs(value) < 1e-12 else value))


def _styled() -> AbstractContextManager:
    return optional_dependencies.load("matplotlib").rc_context(_STYLE)


def _figure(width: float, height: float) -> "Figure":
    module = optional_dependencies.load("matplotlib.figure")
    return module.Figure(figsize=(width, height), layout="constrained")
