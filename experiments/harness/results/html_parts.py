"""Parts of HTML pages that need no network: tables, curves with bands, sections."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.harness.cli import config_files
from experiments.harness.results.plots import COLORS, Curve, aligned

_PAGE = Path(__file__).with_name("page.html")
_DASHES = ("", "8 4", "8 4 2 4", "2 3")
_ROWS = 30
"""Rows of the table under a curve, at most."""


def page(title: str, sections: Mapping[str, str]) -> str:
    """A page of `sections`, each with its heading; "" is text before the first heading."""
    parts = (
        f"<h2>{html.escape(name)}</h2>\n" * bool(name) + f"{x}\n" for name, x in sections.items()
    )
    template = Template(_PAGE.read_text(encoding="utf-8"))
    return template.substitute(title=html.escape(title), body="".join(parts))


def table(columns: Mapping[str, Sequence[str]]) -> str:
    """A table of `columns`, which are equally long."""
    if not columns:
        return "<p>There are none.</p>"
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in zip(*columns.values(), strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def settings(values: Mapping[str, Any]) -> str:
    """Nested settings as a table of dotted names."""
    pairs = config_files.flat(dict(values))
    if not pairs:
        return "<p>There are none.</p>"
    return table({"name": list(pairs), "value": list(map(str, pairs.values()))})


def details(summary: str, content: str) -> str:
    """`content` that is shown when the reader opens it."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def legend(names: Sequence[str]) -> str:
    """What the lines of `chart` are called."""
    lines = (
        f'<li><svg viewBox="0 0 40 10" aria-hidden="true">'
        f'<line x1="0" y1="5" x2="40" y2="5" style="{_style(i)}"/></svg> {html.escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(lines)}</ul>'


def chart(name: str, lines: Mapping[str, Sequence[Curve]]) -> str:
    """Curves as SVG, and their numbers as a table.

    Each of `lines` is the mean of its curves at the steps that all have, with a band from the least
    to the largest value; "" where there is none. One line alone needs no name.
    """
    means = {line: aligned(curves) for line, curves in lines.items()}
    means = {line: found for line, found in means.items() if len(found[0])}
    if not means:
        return ""
    box = _box([(steps, values) for steps, values in means.values()])
    several = len(lines) > 1
    drawn = "".join(
        _line(steps, values, box, _style(i) if several else "")
        for i, (steps, values) in enumerate(means.values())
    )
    title = html.escape(name.replace("_", " "))
    first, last, least, most = box
    told = "; ".join(_told(line, *found) for line, found in means.items())
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 400 200" role="img">'
        f"<title>{title} by step</title><desc>{html.escape(told)}</desc>"
        '<line x1="50" y1="170" x2="390" y2="170"/><line x1="50" y1="20" x2="50" y2="170"/>'
        f'<text x="4" y="24">{_short(most)}</text><text x="4" y="172">{_short(least)}</text>'
        f'<text x="50" y="188">{first:.0f}</text>'
        f'<text x="390" y="188" text-anchor="end">step {last:.0f}</text>'
        f"{drawn}</svg>{details('Numbers', table(_numbers(name, means)))}</figure>"
    )


_Found = tuple[Float[np.ndarray, " steps"], Float[np.ndarray, "curves steps"]]


def _box(found: Sequence[_Found]) -> tuple[float, float, float, float]:
    """The first and last step, the least and the largest value."""
    steps = np.concatenate([steps for steps, _ in found])
    values = np.concatenate([values.ravel() for _, values in found])
    return float(steps.min()), float(steps.max()), float(values.min()), float(values.max())


def _line(
    steps: Float[np.ndarray, " steps"],
    values: Float[np.ndarray, "curves steps"],
    box: tuple[float, float, float, float],
    style: str,
) -> str:
    first, last, least, most = box
    x = 50 + 340 * (steps - first) / ((last - first) or 1.0)

    def points(row: Float[np.ndarray, " steps"]) -> list[str]:
        y = 170 - 150 * (row - least) / ((most - least) or 1.0)
        return [f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True)]

    band = ""
    if len(values) > 1:
        around = [*points(values.max(axis=0)), *reversed(points(values.min(axis=0)))]
        fill = style.replace("stroke:", "fill:").partition(";")[0]
        band = f'<path class="band" style="{fill}" d="M{" L".join(around)}Z"/>'
    path = "M" + " L".join(points(values.mean(axis=0)))
    return f'{band}<path class="line" style="{style}" d="{path}"/>'


def _style(number: int) -> str:
    """Colour and dashes of line `number`."""
    dash = _DASHES[number // len(COLORS) % len(_DASHES)]
    return f"stroke:{COLORS[number % len(COLORS)]};stroke-dasharray:{dash or 'none'}"


def _told(
    line: str, steps: Float[np.ndarray, " steps"], values: Float[np.ndarray, "curves steps"]
) -> str:
    mean = values.mean(axis=0)
    return (
        f"{line}{': ' if line else ''}from {mean[0]:.4g} at step {steps[0]:.0f} to {mean[-1]:.4g} "
        f"at {steps[-1]:.0f}"
    )


def _numbers(name: str, means: Mapping[str, _Found]) -> dict[str, list[str]]:
    """The columns of the table under a chart."""
    steps = sorted({step for found, _ in means.values() for step in found.tolist()})
    steps = steps[:: -(-len(steps) // _ROWS)]
    columns = {"step": [f"{step:.0f}" for step in steps]}
    for line, (found, values) in means.items():
        mean = dict(zip(found.tolist(), values.mean(axis=0).tolist(), strict=True))
        columns[line or name] = [f"{mean[s]:.5g}" if s in mean else "" for s in steps]
    return columns


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1_000 else f"{number:.3g}"
