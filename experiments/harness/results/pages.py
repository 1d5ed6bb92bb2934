"""The HTML page of a run, or of several: one file that asks for nothing from the network."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.results import statistics, tables
from experiments.harness.results.attention_views import AttentionView
from experiments.harness.results.charts import Chart, Range, chart, quantity, ranges, shown
from experiments.harness.results.comparing import Comparison, baseline_first, compare
from experiments.harness.results.groups import (
    Group,
    devices_of,
    expand,
    group_runs,
    item_sums,
    main_metric,
    numbers,
    sample_texts,
    seconds_of,
    seed_of,
)
from experiments.harness.results.plots import Curves, logged_curves
from experiments.harness.results.tables import Table
from experiments.harness.runs.run_files import Record
from experiments.harness.runs.run_folder import Run
from jaxformer import optional_dependencies, storage
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained import is_pretrained

_FIRST_SAMPLES, _SAMPLES = 3, 12
"""Samples that are seen at once, and all of a page."""
_ATTENTION = 32_000
"""Characters of attention weights in a page; sentences and layers beyond are left out."""
_COUNTS = ("sentences", "words", "tokens", "bytes")
"""Numbers of scores.json that say how long the text is."""
_WORK = ("nats", "stride")
"""Numbers of scores.json that are no scores."""


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


class Page(NamedTuple):
    """All that a page shows, as text: the template puts it in its place and computes nothing."""

    title: str
    warnings: Sequence[str] = ()
    score: str = ""
    """The score that stands first, with its interval."""
    score_name: str = ""
    facts: Mapping[str, str] = {}
    command: str = ""
    ranges: Sequence[Range] = ()
    """The scores of several groups of runs."""
    tables: Mapping[str, Table] = {}
    runs: Table | None = None
    notes: Sequence[str] = ()
    """What the columns of the tables mean."""
    charts: Sequence[Chart] = ()
    more_charts: Sequence[Chart] = ()
    samples: Table | None = None
    more_samples: Table | None = None
    attention: Sequence[Mapping[str, Any]] = ()
    details: Mapping[str, Table] = {}


def run_page(folder: Path, contents: Contents | None = None) -> Page:
    """The page of the run in `folder`, with what is there; it says what is missing.

    The folder may also be one of `transformers`.
    """
    files = {
        name: Record(folder / name).read_if_intact()
        for name in ("scores.json", "config.json", "env.json")
    }
    scores, config, environment = files.values()
    curves = logged_curves([Group(folder.name, [folder])])
    missing = [name for name, content in files.items() if not content]
    missing += [] if curves else ["metrics.jsonl"]
    warnings, unscored = [f"{name} is missing or damaged." for name in missing], "Not scored yet."
    if is_pretrained(folder):
        warnings, unscored = ["This is a folder of transformers: it has no scores or curves."], ""
    first, *others = _scores(folder, scores) or [("", "")]
    details = {name: _settings(content) for name, content in files.items() if content}
    facts = {**dict(others), **_facts(folder, config, environment)}
    if contents:
        details = {"parameters": (sizes := _sizes(contents.params))} | details
        facts["parameters"] = sizes.rows[-1][1]
    charts, more_charts = _charts(_paired(curves))
    samples, more_samples = _samples(contents.samples if contents else {})
    return Page(
        title=f"{folder.absolute().parent.name}: {folder.name}",
        warnings=warnings,
        score=first[1],
        score_name=f"{first[0]} on {_text(scores)}" if first[1] else unscored,
        facts=facts,
        command=environment.get("command", ""),
        attention=_attention(contents.sentences) if contents else [],
        details=details,
        charts=charts,
        more_charts=more_charts,
        samples=samples,
        more_samples=more_samples,
    )


def runs_page(paths: Sequence[str | Path], metric: str = "", baseline: str = "") -> Page:
    """The page of the runs in `paths`, folders of runs or of sweeps: their scores and curves.

    Runs whose settings differ in the seed alone are one row and one curve. Runs that cannot be
    compared, as before their end, have curves alone.
    """
    folders = expand(paths)
    grouped = baseline_first(group_runs(folders), baseline)
    try:
        page = _compared(compare(paths, metric, baseline))
    except (ConfigError, DataError) as error:
        page = Page("", warnings=[f"The runs are not compared: {cli.sentence(error)}"])
    environments = (Record(folder / "env.json").read_if_intact() for folder in folders)
    commands = dict.fromkeys(each.get("command", "") for each in environments)
    whole = storage.to_path(paths[0]).absolute()
    charts, more_charts = _charts(logged_curves(grouped))
    samples, more_samples = _samples(_side_by_side(grouped))
    return page._replace(
        title=f"{whole.parent.name}: {whole.name}" if len(paths) == 1 else f"{len(folders)} runs",
        command="\n".join(commands),
        runs=_run_table(grouped),
        charts=charts,
        more_charts=more_charts,
        samples=samples,
        more_samples=more_samples,
    )


def _compared(comparison: Comparison) -> Page:
    """The scores of groups of runs, with the widest interval that is known of each."""
    values = {
        group.name: (group.mean, float(np.fmax.reduce([group.seeds, group.items, group.both])))
        for group in comparison.groups
    }
    kind = quantity(comparison.metric)
    scores = {"Scores": tables.group_table(comparison)}
    if comparison.differences:
        scores["Differences"] = tables.difference_table(comparison)
    return Page(
        title="",
        warnings=tables.warnings(comparison),
        score_name=" ".join(filter(None, (kind.label, kind.unit)))
        + f" on the {comparison.text} text; ±: 95 %, the widest interval that is known",
        ranges=ranges(kind, values),
        tables=scores,
        notes=tables.describe(comparison),
    )


def html(page: Page) -> str:
    """`page` as the text of a file."""
    return _template().render(page._asdict())


@cache
def _template() -> Any:
    jinja2 = optional_dependencies.load("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment.get_template("page.html")


def _scores(folder: Path, scores: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of scores.json, that of the default metric first.

    They are rounded to what other test items leave certain.
    """
    values = {x: y for x, y in numbers(scores).items() if x not in (*_COUNTS, *_WORK)}
    rows = {}
    for metric, value in values.items():
        sums = item_sums(folder, metric, scores)
        half = statistics.item_half_width(*sums) if sums and len(sums[0]) > 1 else math.nan
        kind = quantity(metric)
        text = statistics.rounded(value * kind.scale, half * kind.scale)
        rows[metric] = kind.label, f"{text} {kind.unit}".strip()
    first = main_metric(values)
    return [row for _, row in sorted(rows.items(), key=lambda item: item[0] != first)]


def _text(scores: Mapping[str, Any]) -> str:
    """The text that was scored, and its length."""
    counts = [f"{scores[name]:,} {name}" for name in _COUNTS if name in scores]
    return (
        f"the {scores.get('text', 'unknown')} text ({', '.join(counts)}); ±: 95 % over other texts"
    )


def _facts(folder: Path, config: Mapping[str, Any], environment: dict[str, Any]) -> dict[str, str]:
    """How long the run trained, on what, and how fast, as far as its folder says it."""
    lines = Run(folder).metrics()
    total = config.get("optimizer", {}).get("total_steps")
    weights = Record(folder / "weights.json").read_if_intact().get("steps", [])
    seconds = seconds_of(environment)
    facts = {
        "steps": f"{lines[-1]['step']:,}" + (f" of {total:,}" if total else "") if lines else "",
        "weights": f"of step {', '.join(f'{step:,}' for step in weights)}" if weights else "",
        "time": _duration(seconds) if seconds is not None else "",
        "device": devices_of(environment),
        "started": str(environment.get("time", ""))[:16].replace("T", " "),
    }
    for metric in ("tokens_per_second", "mfu", "memory_peak"):
        kind, values = quantity(metric), [line[metric] for line in lines if metric in line]
        if values:
            facts[kind.label] = f"{shown(kind.scale * float(np.median(values)))} {kind.unit}"
    return {name: text for name, text in facts.items() if text}


def _duration(seconds: float) -> str:
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {left:02} s"


def _paired(curves: Curves) -> Curves:
    """The curves of a single run by metric, with the validation's beside those of the training."""
    panels: Curves = {}
    for metric, (runs,) in ((metric, named.values()) for metric, named in curves.items()):
        base = metric.removeprefix("validation_")
        part = "training" if metric == base else "validation"
        panels.setdefault(base if base in curves else metric, {})[part] = runs
    return {
        metric: named if len(named) > 1 else {"": next(iter(named.values()))}
        for metric, named in panels.items()
    }


def _charts(curves: Curves) -> tuple[list[Chart], list[Chart]]:
    """The charts of the loss and of the validation's scores, and those of all other numbers."""
    first = sorted(
        (metric for metric in curves if metric == "loss" or metric.startswith("validation_")),
        key=lambda metric: (not metric.endswith("loss"), "validation" not in metric),
    )
    others = [metric for metric in curves if metric not in first]
    made = [[chart(quantity(x), curves[x]) for x in metrics] for metrics in (first, others)]
    return made[0], made[1]


def _run_table(grouped: Sequence[Group]) -> Table:
    """A row for each run: its seed, length, time and device."""
    rows = []
    for group in grouped:
        for folder in group.folders:
            facts = _facts(folder, {}, environment := Record(folder / "env.json").read_if_intact())
            seconds = seconds_of(environment)
            minutes = "-" if seconds is None else f"{seconds / 60:.1f}"
            names = folder.name, str(seed_of(folder))
            keys = "steps", "speed", "device", "started"
            steps, speed, device, started = (facts.get(key, "-") for key in keys)
            rows.append([*names, steps, minutes, speed.removesuffix(" tokens/s"), device, started])
    titles = "run", "seed", "steps", "minutes", "tokens/s", "device", "started"
    return Table(titles, rows)


def _side_by_side(grouped: Sequence[Group]) -> dict[str, Sequence[str]]:
    """The samples of the first run of each group: columns that all share, and one for each."""
    written = {group.name: sample_texts(group.folders[0]) for group in grouped}
    written = {name: columns for name, columns in written.items() if columns}
    shared = {
        title: column
        for columns in written.values()
        for title, column in columns.items()
        if all(other.get(title) == column for other in written.values())
    }
    own = {
        name: column
        for name, columns in written.items()
        for title, column in columns.items()
        if title not in shared
    }
    return {**shared, **own}


def _samples(columns: Mapping[str, Sequence[str]]) -> tuple[Table | None, Table | None]:
    """The first rows of samples, and further ones; None where there are none."""
    rows = list(islice(zip(*columns.values(), strict=True), _SAMPLES))
    first, others = rows[:_FIRST_SAMPLES], rows[_FIRST_SAMPLES:]
    return (
        Table(list(columns), first) if first else None,
        Table(list(columns), others) if others else None,
    )


def _sizes(params: Any) -> Table:
    """The number of parameters of each part of the model, and of all parts."""
    counts = {name: sum(map(np.size, jax.tree.leaves(part))) for name, part in params.items()}
    counts["all"] = sum(counts.values())
    return Table(("part", "parameters"), [(name, f"{n:,}") for name, n in counts.items()])


def _settings(content: Mapping[str, Any]) -> Table:
    """The settings in a file, as a person would write them."""
    values = {name: json.loads(text) for name, text in config_files.flat(content).items()}
    texts = {
        name: shown(value) if isinstance(value, float) else "-" if value is None else str(value)
        for name, value in values.items()
    }
    return Table(("name", "value"), list(texts.items()))


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
