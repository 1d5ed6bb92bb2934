"""One HTML page of a run, in one file that asks for nothing from the network."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness.results import html_parts
from experiments.harness.results.attention_views import AttentionView
from experiments.harness.results.html_parts import chart, details, settings, table
from experiments.harness.runs.run_folder import Run
from jaxformer.pretrained import is_pretrained

_ATTENTION = Path(__file__).with_name("attention_view.html")
_MOST = 1_200_000
"""Characters of attention weights in a page; further sentences are left out."""


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
    scores = {name: value for name, value in files["scores"].items() if name != "search"}
    for name, (low, high) in intervals.items():
        scores[f"{name}, 95 % interval"] = f"{low:.2f} to {high:.2f}"
    curves = (chart(name, {"": [curve(name, metrics)]}) for name in logged_names(metrics))
    sections = {
        "": "".join(f"<p><strong>{reason}</strong></p>" for reason in missing),
        "Scores": settings(scores) if scores else "<p>The run has not been scored.</p>",
        "Curves": f'<div class="charts">{"".join(curves)}</div>',
        "Samples": f'<div class="scroll samples">{table(samples)}</div>',
        "Attention": _attention(sentences),
        "Sizes": table(_sizes(params)),
        "Settings": details("Search of the scores", settings(files["scores"].get("search", {})))
        + details("Configuration", settings(files["config"]))
        + details("Environment", settings(files["env"])),
    }
    return html_parts.page(f"{folder.parent.name}: {folder.name}", sections)


def logged_names(metrics: Sequence[Mapping[str, float]]) -> list[str]:
    """The numbers that were logged more than once, in the order of their first line."""
    names = dict.fromkeys(name for line in metrics for name in line if name != "step")
    return [name for name in names if sum(name in line for line in metrics) > 1]


def curve(name: str, metrics: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    """The steps and values of the number `name`."""
    points = [(line["step"], line[name]) for line in metrics if name in line]
    return [step for step, _ in points], [value for _, value in points]


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


def _attention(sentences: Sequence[Sentence]) -> str:
    """The view of the attention weights of `sentences`."""
    data = json.dumps(_limited(sentences), ensure_ascii=False)
    return Template(_ATTENTION.read_text(encoding="utf-8")).substitute(
        hide_none=" hidden" if sentences else "",
        hide_attention="" if sentences else " hidden",
        data=data.replace("<", "\\u003c"),
    )


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
