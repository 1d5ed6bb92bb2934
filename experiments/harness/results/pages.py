"""The HTML page of a run, one file that asks for nothing from the network."""

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness.cli import config_files
from experiments.harness.results import statistics
from experiments.harness.results.attention_views import AttentionView
from experiments.harness.results.groups import Group, item_sums, numbers, read_json
from experiments.harness.results.plots import learning_curves, logged_curves
from experiments.harness.results.tables import Table
from jaxformer import optional_dependencies
from jaxformer.pretrained import is_pretrained

_SAMPLES = 12
"""Rows of the table of samples."""
_ATTENTION = 40_000
"""Characters of attention weights in a page; sentences and layers beyond are left out."""


class Sentence(NamedTuple):
    """A text and the attention within it."""

    text: str
    views: Sequence[AttentionView]


class Contents(NamedTuple):
    """The part of a run's page that its experiment makes."""

    params: Any
    sentences: Sequence[Sentence]
    samples: Mapping[str, Sequence[str]]
    """Columns of equal lengths."""


def run_page(folder: Path, contents: Contents | None = None) -> str:
    """The page of the run in `folder`, with what is there; it says what is missing.

    The folder may also be one of `transformers`.
    """
    files = {name: read_json(folder / name) for name in ("config.json", "env.json", "scores.json")}
    curves, scores = _curves(folder), files["scores.json"]
    missing = [name for name, content in files.items() if not content]
    missing += [] if curves else ["metrics.jsonl"]
    warnings = [f"{name} is missing or damaged." for name in missing]
    if is_pretrained(folder):
        warnings = ["This is a folder of transformers: it has no scores, curves or environment."]
    return _template().render(
        title=f"{folder.absolute().parent.name}: {folder.name}",
        warnings=warnings,
        scores=_score_table(folder, scores) if scores else None,
        curves=curves,
        samples=_table(contents.samples) if contents else None,
        attention=_attention(contents.sentences) if contents else [],
        sizes=_sizes(contents.params) if contents else None,
        files={
            name: Table(
                ("name", "value"),
                [(key, text.strip('"')) for key, text in config_files.flat(content).items()],
            )
            for name, content in files.items()
        },
    )


@cache
def _template() -> Any:
    jinja2 = optional_dependencies.load("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.get_template("page.html")


def _score_table(folder: Path, scores: dict[str, Any]) -> Table:
    """The numbers of scores.json, rounded to what other test items leave certain."""
    rows = []
    for metric, value in numbers(scores).items():
        sums = item_sums(folder, metric, scores)
        half = statistics.item_half_width(*sums) if sums and len(sums[0]) > 1 else math.nan
        text = f"{value:,.0f}" if value.is_integer() else statistics.rounded(value, half)
        rows.append((metric, text))
    return Table(("score", "± 95 % over test items"), rows)


def _curves(folder: Path) -> str:
    """The address of a picture of all numbers that the run logged; "" for none.

    Losses come first, and of each kind those of the validation.
    """
    curves = logged_curves([Group(folder.name, [folder])])
    if not curves:
        return ""
    names = sorted(curves, key=lambda name: (not name.endswith("loss"), "validation" not in name))
    file = io.BytesIO()
    with optional_dependencies.load("matplotlib").rc_context({"svg.fonttype": "none"}):
        learning_curves({name: curves[name] for name in names}).savefig(file, format="svg")
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _table(columns: Mapping[str, Sequence[str]]) -> Table:
    rows = zip(*columns.values(), strict=True)
    return Table(list(columns), [row for row, _ in zip(rows, range(_SAMPLES), strict=False)])


def _sizes(params: Any) -> Table:
    """The number of parameters of each part of the model, and of all parts."""
    counts = {name: sum(map(np.size, jax.tree.leaves(part))) for name, part in params.items()}
    counts["all"] = sum(counts.values())
    return Table(("part", "parameters"), [(name, f"{n:,}") for name, n in counts.items()])


def _attention(sentences: Iterable[Sentence]) -> list[dict]:
    """The sentences as the page's program reads them, as many as fit into the page.

    Of the first sentence, where it is too large, the last layers.
    """
    room = _ATTENTION
    kept: list[dict] = []
    for text, views in sentences:
        size = sum(view.weights.size for view in views)
        layers = max((len(view.weights) for view in views), default=0)
        shown = layers if size <= room else max(1, layers * room // size)
        if kept and shown < layers:
            break
        kept.append({"text": text, "views": [_encoded(view, shown) for view in views]})
        room -= size
    return kept


def _encoded(view: AttentionView, layers: int) -> dict[str, Any]:
    """The last `layers` of a view, a text for each head with a character for each weight.

    The character of n percent is that of the number n + 63 up to 63 percent, and n + 97 from there:
    one that JSON and HTML do not escape.
    """
    percent = np.round(100 * view.weights[-layers:]).astype(int)
    codes = np.where(percent < 64, percent + 63, percent + 97)
    return {
        "kind": view.kind,
        "queries": list(view.query_tokens),
        "keys": list(view.key_tokens),
        "first_layer": len(view.weights) - len(percent),
        "weights": [["".join(map(chr, head.ravel())) for head in layer] for layer in codes],
    }
