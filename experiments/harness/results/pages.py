"""The HTML page of a run, or of several: one file that asks for nothing from the network."""

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.results import plots, tables
from experiments.harness.results.attention_views import AttentionView
from experiments.harness.results.comparing import Comparison, compare_groups
from experiments.harness.results.find_runs import expand
from experiments.harness.results.groups import Group, group_runs
from experiments.harness.results.plots import Curves, Interval, Styles
from experiments.harness.results.run_facts import COUNTS, RunFacts
from experiments.harness.results.run_samples import sample_texts
from experiments.harness.results.sweep_failures import failed_cells, short_names
from experiments.harness.results.tables import Table
from experiments.harness.results.token_units import letters_of_tokens
from experiments.harness.runs.quantities import described
from experiments.harness.runs.rounding import shown
from jaxformer import optional_dependencies, storage
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained import is_pretrained
from jaxformer.records import Record

_SAMPLES = 12
"""Texts in a page; the others are left out."""
_COMMANDS = 3
"""Commands that a page shows unfolded."""
_ATTENTION = 32_000
"""Attention weights in a page; sentences and layers beyond are left out."""
_FACTS = (  # of a run, in the order of its page
    "state",
    "steps",
    "weights",
    "time",
    "device",
    "started",
    "parent",
    "speed",
    "MFU",
    "most memory in use",
)
_RUN_COLUMNS = "run", "seed", "state", "steps", "time", "speed", "device"


class Sentence(NamedTuple):
    """A text and the attention within it."""

    text: str
    views: Sequence[AttentionView]


class Contents(NamedTuple):
    """The part of a run's page that its experiment makes."""

    params: Any
    sentences: Sequence[Sentence]
    samples: Mapping[str, Sequence[str]]
    """Columns of equal lengths: the texts that were read, then "reference" and "model" if known."""


def run_page(folder: Path, contents: Contents | None = None) -> str:
    """The page of the run in `folder`, as far as it has got; the page says what is missing.

    The folder may also be one of `transformers`.
    """
    run = RunFacts(folder)
    is_run = not is_pretrained(folder)
    files = {"scores.json": run.scores, "config.json": run.config, "env.json": run.environment}
    details = {name: _settings(content) for name, content in files.items()}
    warnings = ["This is a folder of transformers: it has no scores or curves."]
    if is_run:
        warnings = _problems_of(run, files)
    scores = run.describe_scores(intervals=True)
    main_metric = next(iter(scores), "")
    if main_metric:
        score_name = f"{main_metric} on {_text(run.scores)}"
    else:
        score_name = "Not scored yet." if is_run else ""
    facts = {name: score for name, score in scores.items() if name != main_metric}
    if is_run and run.config:
        known = run.describe()
        facts |= {name: known[name] for name in _FACTS if name in known}
    trackers = Record(folder / "trackers.json").read_if_intact()
    facts |= {name: tracker["address"] for name, tracker in trackers.items()}
    attention: list[dict] = []
    samples = None
    if contents:
        sizes = _sizes(contents.params)
        details = {"parameters": sizes, **details}
        facts["parameters"] = sizes.rows[-1][1]
        attention = _attention(contents.sentences)
        samples = _side_by_side({"model": contents.samples})
    styles = plots.styles(("training", "validation"))
    return _html(
        title=f"{folder.absolute().parent.name}: {folder.name}",
        warnings=warnings,
        score=scores.get(main_metric, ""),
        score_name=score_name,
        facts=facts,
        command=run.environment.get("command", ""),
        styles=styles,
        legend={name: name for name in styles},
        attention=attention,
        details={name: table for name, table in details.items() if table.rows},
        samples=samples,
        **_charts(_paired(plots.logged_curves([Group(folder.name, [folder])])), {}, styles),
    )


def _problems_of(run: RunFacts, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The state of a run that is not done, and the `files` that are missing or damaged.

    A damaged file is empty there.
    """
    is_done = run.state == "done"
    problems = [] if is_done else [run.describe_state()]
    for name, content in files.items():
        if (run.folder / name).is_file():
            if not content:
                problems.append(f"{name} is damaged.")
        elif is_done or name in ("config.json", "env.json"):
            problems.append(f"{name} is missing.")
    if is_done and not (run.folder / "metrics.jsonl").is_file():
        problems.append("metrics.jsonl is missing.")
    return problems


def runs_page(paths: Sequence[str | Path], metric: str = "", baseline: str = "") -> str:
    """The page of the runs in `paths`, folders of runs or of sweeps: their scores and curves.

    Runs whose settings differ in the seed alone are one row and one curve. Runs that cannot be
    compared, as before their end, have curves alone. Losses of different tokens have different
    panels.
    """
    folders = expand(paths)
    groups = group_runs(folders, baseline)
    styles = plots.styles(group.name for group in groups)
    runs = [(group, RunFacts(folder)) for group in groups for folder in group.folders]
    names = short_names([run.folder for _, run in runs])
    rows = [
        (group, run.describe() | {"run": name})
        for (group, run), name in zip(runs, names, strict=True)
    ]
    ended = [run.folder for _, run in runs if run.state == "done"]
    finished = [
        group._replace(folders=[folder for folder in group.folders if folder in ended])
        for group in groups
    ]
    try:
        if not ended:
            raise ConfigError("none of them has ended")
        scores = _compared(compare_groups(finished, paths, metric), groups, styles)
    except (ConfigError, DataError) as error:
        scores = {"warnings": [f"The runs are not compared: {cli.sentence(error)}"]}
    failed = failed_cells(paths)
    unfinished = [f"{cell.label}: failed: {cell.error}" for cell in failed]
    unfinished += [
        f"{name}: {run.describe_state()}"
        for (_, run), name in zip(runs, names, strict=True)
        if run.folder not in ended and not any(cell.has_run(run.folder) for cell in failed)
    ]
    scores["warnings"] = unfinished + scores["warnings"]
    whole = storage.to_path(paths[0]).absolute()
    letters = letters_of_tokens(groups)
    commands = dict.fromkeys(run.environment.get("command", "") for _, run in runs)
    return _html(
        title=f"{whole.parent.name}: {whole.name}" if len(paths) == 1 else f"{len(folders)} runs",
        command="\n".join(commands),
        many_commands=len(commands) > _COMMANDS,
        styles=styles,
        legend={group.name: group.label for group in groups},
        runs=Table(
            ("group", *_RUN_COLUMNS),
            [[group.name, *(x.get(title, "-") for title in _RUN_COLUMNS)] for group, x in rows],
        ),
        samples=_side_by_side({group.name: sample_texts(group.folders[0]) for group in groups}),
        differing=_differing(groups),
        banded=any(len(group.folders) > 1 for group in groups),
        curves_note=plots.describe_letters(letters),
        **scores,
        **_charts(plots.logged_curves(groups), letters, styles),
    )


def _differing(groups: Sequence[Group]) -> Table | None:
    """The settings in which `groups` differ, a row for each group; None where there are none."""
    fields = sorted({field for group in groups for field in group.values})
    rows = [
        [group.name, *(group.values.get(field, "-").strip('"') for field in fields)]
        for group in groups
    ]
    return Table(("group", *fields), rows) if fields else None


def _compared(comparison: Comparison, groups: Sequence[Group], styles: Styles) -> dict[str, Any]:
    """The scores of groups of runs, with the widest interval that is known of each."""
    metric = comparison.metric
    values = {group.name: group.values for group in groups}
    intervals = {
        group.name: Interval(
            group.name,
            [run.value for run in group.runs],
            float(np.fmax.reduce([group.seeds, group.items])),
        )
        for group in comparison.groups
    }
    figures = {"Scores": plots.score_strip(metric, list(intervals.values()), styles)}
    for field in sorted({field for each in values.values() for field in each}):
        lines: dict[str, list[tuple[float, Interval]]] = {}
        for name in intervals:
            other_settings = [
                f"{x.split('.')[-1]}={y}" for x, y in values[name].items() if x != field
            ]
            with_value = _number(values[name].get(field, "")), intervals[name]
            lines.setdefault(", ".join(other_settings), []).append(with_value)
        points = {x for line in lines.values() for x, _ in line}
        if len(points) > 2 and not any(map(math.isnan, points)):
            figures[field] = plots.score_by_value(metric, field, lines)
    scores = {"Scores": tables.group_table(comparison)}
    if comparison.differences:
        scores["Differences"] = tables.difference_table(comparison)
    return {
        "warnings": tables.warnings(comparison),
        "score_name": f"{described(metric)}, on the {comparison.text} text; "
        "±: 95 %, the widest interval that is known",
        "figures": [plots.svg(figure, label) for label, figure in figures.items()],
        "tables": scores,
        "notes": tables.describe(comparison),
    }


def _number(text: str) -> float:
    """The number that `text` is in JSON, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _html(**shown: Any) -> str:
    dashes = dict(zip(plots.DASHES, ("", "4 2", "4 2 1 2", "1 2"), strict=True))
    return _template().render(colors=plots.COLORS, dashes=dashes, **shown)


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


def _text(scores: Mapping[str, Any]) -> str:
    """The text that was scored, its length, and what the interval of a score means."""
    counts = [f"{scores[name]:,} {name}" for name in COUNTS if name in scores]
    return (
        f"the {scores.get('text', 'unknown')} text ({', '.join(counts)}); ±: 95 % over other texts"
    )


def _paired(curves: Curves) -> Curves:
    """The curves of a single run by metric, each validation next to its training."""
    panels: Curves = {}
    for metric, curves_by_run in curves.items():
        (curve,) = curves_by_run.values()
        trained = metric.removeprefix("validation_")
        part = "training" if metric == trained else "validation"
        panel = trained if trained in curves else metric
        panels.setdefault(panel, {})[part] = curve
    return panels


def _charts(curves: Curves, letters: Mapping[str, str], styles: Styles) -> dict[str, list[str]]:
    """The charts of the loss and of the validation's scores, and charts of all other numbers.

    A loss has one for each of the `letters` of tokens.
    """
    first = sorted(
        (metric for metric in curves if metric == "loss" or metric.startswith("validation_")),
        key=lambda metric: (not metric.endswith("loss"), "validation" not in metric),
    )
    drawn: dict[str, list[str]] = {metric: [] for metric in curves}
    for panel in plots.panels_of(curves, letters):
        figure = plots.curve_figure(panel, styles)
        drawn[panel.metric].append(plots.svg(figure, panel.label))
    charts = [figure for metric in first for figure in drawn.pop(metric)]
    return {"charts": charts, "more_charts": [figure for each in drawn.values() for figure in each]}


def _side_by_side(written: Mapping[str, Mapping[str, Sequence[str]]]) -> Table | None:
    """The output of each name for the same text, a row for each text; wrong ones first.

    `written[name]` are columns: the text, perhaps a reference, and "model". A name without a text
    has "" there. None where there are no samples.
    """
    tables_of = {
        name: [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        for name, columns in written.items()
    }
    merged: dict[str, dict[str, str]] = {}
    titles: dict[str, None] = {}
    for rows in zip_longest(*tables_of.values(), fillvalue=None):
        for name, row in zip(tables_of, rows, strict=True):
            if row is not None:
                model = {name: row.pop("model")} if "model" in row else {}
                titles |= dict.fromkeys(row)
                key = next(iter(row.values()))
                merged[key] = row | merged.get(key, {}) | model
    if not merged:
        return None
    columns = [*titles, *(name for name in written if any(name in row for row in merged.values()))]

    def count_right(row: Mapping[str, str]) -> int:
        return sum(name in row and row[name] == row.get("reference") for name in written)

    ordered = sorted(merged.values(), key=count_right)[:_SAMPLES]
    return Table(columns, [[row.get(title, "") for title in columns] for row in ordered])


def _sizes(params: Any) -> Table:
    """The number of parameters of each part of the model, and of all parts."""
    counts = {name: sum(map(np.size, jax.tree.leaves(part))) for name, part in params.items()}
    counts["all"] = sum(counts.values())
    return Table(("part", "parameters"), [(name, f"{n:,}") for name, n in counts.items()])


def _settings(content: Mapping[str, Any]) -> Table:
    """The settings in a file, as a person would write them."""
    rows = []
    for name, text in config_files.flat(content).items():
        value = json.loads(text)
        if value is None:
            rows.append((name, "-"))
        elif isinstance(value, float):
            rows.append((name, shown(value)))
        else:
            rows.append((name, str(value)))
    return Table(("name", "value"), rows)


def _attention(sentences: Iterable[Sentence]) -> list[dict]:
    """The sentences as the page's program reads them, as many as fit into the page.

    The first sentence has only its last layers where it is too large.
    """
    room = _ATTENTION
    kept: list[dict] = []
    for text, views in sentences:
        size = sum(view.weights.size for view in views)
        most = max((len(view.weights) for view in views), default=0)
        layers = most if size <= room else max(1, most * room // size)
        if kept and layers < most:
            break
        kept.append({"text": text, "views": [_encoded(view, layers) for view in views]})
        room -= size
    return kept


def _encoded(view: AttentionView, layers: int) -> dict[str, Any]:
    """The last `layers` of a view: a byte for each weight in percent, and its sharpest head."""
    weights = view.weights[-layers:]
    percent = np.round(100 * weights).astype(np.uint8)
    return {
        "kind": view.kind,
        "queries": list(view.query_tokens),
        "keys": list(view.key_tokens),
        "first_layer": len(view.weights) - len(percent),
        "sharpest": sharpest_head(weights),
        "weights": [[base64.b64encode(x.tobytes()).decode() for x in layer] for layer in percent],
    }


def sharpest_head(weights: np.ndarray) -> list[int]:
    """The layer and head of `weights` [layers, heads, T, S] whose rows tell most of their query.

    That is the mutual information of query and key: a head whose rows are all alike, as where each
    attends to the first token, has none.
    """
    entropy = lambda p: -np.sum(p * np.log(np.maximum(p, 1e-9)), axis=-1)  # noqa: E731
    told = entropy(weights.mean(axis=-2)) - entropy(weights).mean(axis=-1)
    return [int(index) for index in np.unravel_index(np.argmax(told), told.shape)]
