"""One HTML page of a run, in one file that asks for nothing from the network."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness.attention_views import AttentionView
from experiments.harness.config_files import flat
from experiments.harness.run_folder import Run
from jaxformer.pretrained import is_pretrained

_TEMPLATE = Path(__file__).with_name("report.html")
_MOST = 1_200_000
"""Characters of attention weights in a page; further sentences are left out."""
_ROWS = 30
"""Rows of the table under a curve, at most."""


class Sentence(NamedTuple):
    """A text and what attends to what in it."""

    text: str
    views: Sequence[AttentionView]


def page(
    folder: Path,
    params: Any,
    sentences: Sequence[Sentence],
    samples: Mapping[str, Sequence[str]],
    intervals: Mapping[str, tuple[float, float]],
) -> str:
    """The page of the run in `folder`, with what is there; it says what is missing.

    The folder may also be one of `transformers`. `params` are the model's. `samples` are columns,
    equally long; `intervals` has the ends of the 95 % interval of scores.
    """
    files = {name: _read(folder / f"{name}.json") for name in ("config", "env", "scores")}
    metrics = Run(folder).metrics()
    missing = [f"{name}.json is missing or damaged." for name, text in files.items() if not text]
    missing += [] if metrics else ["metrics.jsonl is missing or damaged."]
    if is_pretrained(folder):
        missing = ["This is a folder of transformers: it has no scores, curves or environment."]
    data = json.dumps(_limited(sentences), ensure_ascii=False)
    scores = {name: value for name, value in files["scores"].items() if name != "search"}
    for name, (low, high) in intervals.items():
        scores[f"{name}, 95 % interval"] = f"{low:.2f} to {high:.2f}"
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(f"{folder.parent.name}: {folder.name}"),
        missing="".join(f"<p><strong>{reason}</strong></p>" for reason in missing),
        sizes=_table(_sizes(params)),
        scores=_settings(scores) if scores else "<p>The run has not been scored.</p>",
        charts="".join(_chart(name, metrics) for name in _names(metrics)),
        samples=_table(samples),
        search=_settings(files["scores"].get("search", {})),
        config=_settings(files["config"]),
        environment=_settings(files["env"]),
        hide_none=" hidden" if sentences else "",
        hide_attention="" if sentences else " hidden",
        data=data.replace("<", "\\u003c"),
    )


def _sizes(params: Any) -> dict[str, list[str]]:
    """The number of parameters of each part of the model, and of all parts."""
    counts = {name: sum(map(np.size, jax.tree.leaves(part))) for name, part in params.items()}
    counts["all"] = sum(counts.values())
    return {"part": list(counts), "parameters": [f"{count:,}" for count in counts.values()]}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _limited(sentences: Sequence[Sentence]) -> list[dict]:
    """The sentences as JSON holds them, in percent, as many as fit into the page."""
    found: list[dict] = []
    size = 0
    for text, views in sentences:
        one = {
            "text": text,
            "views": [
                {
                    "kind": view.kind,
                    "queries": list(view.query_tokens),
                    "keys": list(view.key_tokens),
                    "weights": np.round(100 * view.weights).astype(int).tolist(),
                }
                for view in views
            ],
        }
        size += len(json.dumps(one))
        if size > _MOST:
            break
        found.append(one)
    return found


def _names(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """The numbers that were logged more than once, in the order of their first line."""
    names = dict.fromkeys(name for line in metrics for name in line if name != "step")
    return [name for name in names if sum(name in line for line in metrics) > 1]


def _chart(name: str, metrics: Sequence[Mapping[str, float]]) -> str:
    """A curve as SVG, and its numbers as a table."""
    points = [(line["step"], line[name]) for line in metrics if name in line]
    steps, values = np.array(points, float).T
    x = 50 + 340 * (steps - steps[0]) / (np.ptp(steps) or 1.0)
    y = 170 - 150 * (values - values.min()) / (np.ptp(values) or 1.0)
    path = "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))
    title = html.escape(name.replace("_", " "))
    told = f"from {values[0]:.4g} at step {points[0][0]} to {values[-1]:.4g} at {points[-1][0]}"
    rows = points[:: -(-len(points) // _ROWS)]
    table = _table({"step": [str(a) for a, _ in rows], name: [f"{b:.5g}" for _, b in rows]})
    return (
        f'<figure><figcaption>{title}</figcaption><svg viewBox="0 0 400 200" role="img">'
        f"<title>{title} by step</title><desc>{told}</desc>"
        '<line x1="50" y1="170" x2="390" y2="170"/><line x1="50" y1="20" x2="50" y2="170"/>'
        f'<text x="4" y="24">{_short(values.max())}</text>'
        f'<text x="4" y="172">{_short(values.min())}</text>'
        f'<text x="50" y="188">{points[0][0]}</text>'
        f'<text x="390" y="188" text-anchor="end">step {points[-1][0]}</text>'
        f'<path d="{path}"/></svg><details><summary>Numbers</summary>{table}</details></figure>'
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1_000 else f"{number:.3g}"


def _settings(values: Mapping[str, Any]) -> str:
    """Nested settings as a table of dotted names."""
    pairs = flat(dict(values))
    if not pairs:
        return "<p>There are none.</p>"
    return _table({"name": list(pairs), "value": list(map(str, pairs.values()))})


def _table(columns: Mapping[str, Sequence[str]]) -> str:
    if not columns:
        return "<p>There are none.</p>"
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in zip(*columns.values(), strict=True)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
