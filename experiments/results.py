"""Evidence for reported numbers: `python -m experiments.results [RUN|SWEEP ..]`.

With runs: adds a line for each group of them to the results.jsonl of their experiment, and one for
each run to its runs.jsonl: settings, time and curve. Then it makes the tables of the experiments'
pages, which stand between `<!-- results: TABLE -->` and `<!-- end -->`. With --figure it draws a
table's curves from those lines.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.harness import cli
from experiments.harness.cli import config_files
from experiments.harness.results import plots
from experiments.harness.results.comparing import compare
from experiments.harness.results.groups import (
    expand,
    experiment_of,
    seconds_of,
    seed_of,
    settings_of,
    shared_settings,
)
from experiments.harness.results.statistics import decimals, rounded
from experiments.harness.results.tables import Table, markdown
from experiments.harness.runs.run_folder import Run
from jaxformer.config import from_plain, to_plain
from jaxformer.errors import ConfigError, DataError

ROOT = Path(__file__).parent
FILE = "results.jsonl"
RUNS_FILE = "runs.jsonl"
_MARKED = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_VERSIONS = ("python", "jax", "jaxlib", "flax", "optax", "numpy")
_POINTS = 50
"""Points of a curve; more are thinned."""


@dataclass(frozen=True)
class ResultsOptions:
    """The runs that are recorded, and the names of their results."""

    runs: tuple[str, ...] = ()
    """Folders of runs, or folders with runs below them; none: only the tables are made."""
    table: str = "quality"
    """The table of the experiment's page that shows them."""
    system: str = ""
    """The name of what was scored; empty: the name of the run."""
    metrics: tuple[str, ...] = ()
    """Scores, a line each, as in `experiments.runs compare`; none: bleu, bits_per_byte or loss. A
    figure has a panel for each; none: all."""
    figure: str = ""
    """File of a picture beside a results.jsonl, such as experiments/translation/choices.svg: the
    validation's scores over the steps, of the runs behind the results of --table."""
    check: bool = False
    """Changes nothing, and fails where a page has another table than its results make."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The command, code and machine of a run; None where unknown."""

    command: str | None = None
    config_sha256: str | None = None
    """SHA-256 of the settings without seed and name."""
    commit: str | None = None
    versions: dict[str, str] | None = None
    device: str | None = None
    seconds: float | None = None
    """The time of the training and its scores, over all starts, of one seed."""
    date: str | None = None


@dataclass(frozen=True, kw_only=True)
class Result(Origin):
    """A reported number and where it comes from; None is what is not known."""

    table: str
    """The table that shows it."""
    system: str
    """The name of what was scored."""
    metric: str
    score: float
    """The mean over the seeds."""
    interval: float | None = None
    """Half of the 95 % bootstrap interval over test items."""
    seeds: list[int] | None = None
    """Empty for a number that depends on no seed."""
    scores: list[float] | None = None
    """The score of each seed."""
    deviation: float | None = None
    """The deviation of the scores of the seeds (n - 1)."""
    text: str | None = None
    """The part of the text that was scored."""
    text_sha256: str | None = None
    signature: str | None = None
    """sacreBLEU's signature."""


@dataclass(frozen=True, kw_only=True)
class TrainedRun(Origin):
    """A run that results are made of; `config_sha256`, `seed` and `device` identify it."""

    seed: int
    curve: dict[str, list[list[float]]]
    """Points [step, value] of the training loss and of each score of the validation."""
    config: dict[str, Any]
    """The settings by their dotted names, without seed and name."""


Line = TypeVar("Line", Result, TrainedRun)


def main(options: ResultsOptions) -> None:
    """Adds the results and makes the tables."""
    if options.runs and not options.check:
        results = results_of(options.runs, options.table, options.system, options.metrics)
        runs = [trained_run(folder) for folder in expand(options.runs, finished=True)]
        folder = ROOT / experiment_of(expand(options.runs)[0])
        append(folder / FILE, results)
        append(folder / RUNS_FILE, runs)
        print(f"{len(results)} results of {len(runs)} runs are recorded in {folder}")
    if options.figure and not options.check:
        draw(Path(options.figure), options.table, options.metrics)
    for page in pages(ROOT):
        text = with_tables(page)
        if text == page.read_text(encoding="utf-8"):
            continue
        if options.check:
            raise DataError(
                f"{page} has a table that its results do not make: run "
                "python -m experiments.results"
            )
        page.write_text(text, encoding="utf-8")
        print(f"the tables of {page} are made anew")


def draw(path: Path, table: str, metrics: Sequence[str] = ()) -> None:
    """Draws the curves of `table` into `path`, from the results and runs recorded beside it.

    `metrics` are the panels, none: all. Raises `DataError` where no run has a curve.
    """
    results = read(path.with_name(FILE), Result)
    drawn = [x for x in results if x.table == table and (not metrics or x.metric in metrics)]
    curves = curves_of(drawn, read(path.with_name(RUNS_FILE), TrainedRun))
    if not curves:
        raise DataError(
            f"{path.with_name(RUNS_FILE)} has no curve of a result of the table {table!r}: give "
            f"--table, one of {', '.join(sorted({x.table for x in results}))}, and --metrics that "
            "its runs were validated by, such as bleu"
        )
    plots.learning_curves(curves).savefig(path)
    print(f"{', '.join(curves)}: see {path}")


def curves_of(results: Iterable[Result], runs: Sequence[TrainedRun]) -> plots.Curves:
    """The curves of the `runs` behind `results`: of their settings, seeds and kind of device."""

    def settings_and_kind(line: Result | TrainedRun) -> tuple[str | None, str]:
        return line.config_sha256, (line.device or "").rpartition(", ")[0]

    curves: plots.Curves = {}
    for result in results:
        name = f"validation_{result.metric}"
        for run in runs:
            same = settings_and_kind(run) == settings_and_kind(result)
            if same and run.seed in (result.seeds or ()) and name in run.curve:
                steps, values = zip(*run.curve[name], strict=True)
                of_system = curves.setdefault(name, {}).setdefault(result.system, [])
                of_system.append((steps, values))
    return curves


def results_of(
    paths: Iterable[str | Path], table: str, system: str = "", metrics: Iterable[str] = ()
) -> list[Result]:
    """A result for each group of the runs in `paths` and each of `metrics` (see `compare`)."""
    paths, results = list(paths), []
    for metric in list(metrics) or [""]:
        comparison = compare(paths, metric)
        for group in comparison.groups:
            name = system if len(comparison.groups) == 1 else f"{system} {group.name}"
            first = group.runs[0]
            results.append(
                Result(
                    table=table,
                    system=name.strip() or group.name,
                    metric=comparison.metric,
                    score=group.mean,
                    interval=None if math.isnan(group.items) else group.items,
                    seeds=[run.seed for run in group.runs],
                    scores=[run.value for run in group.runs],
                    deviation=None if math.isnan(group.deviation) else group.deviation,
                    text=first.text,
                    text_sha256=first.digest or None,
                    signature=first.signature or None,
                    **_origin(first.folder),
                )
            )
    return results


def read(path: Path, kind: type[Line]) -> list[Line]:
    """The results, or runs, in the file `path`; `DataError` names a line that is none."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(from_plain(kind, json.loads(line)))
        except (ValueError, ConfigError) as error:
            raise DataError(f"{path}:{number}: {error}") from error
    return lines


def append(path: Path, new: Sequence[Line]) -> None:
    """Adds a line for each of `new`, in place of one of the same table, system and metric, or of
    the same settings, seed and device."""
    lines: dict[tuple[Any, ...], str] = {}
    if new and path.is_file():
        known = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines = dict(zip(map(_key, read(path, type(new[0]))), known, strict=True))
    lines |= {_key(line): _as_json(line) for line in new}
    path.write_text("".join(lines.values()), encoding="utf-8")


def pages(root: Path) -> list[Path]:
    """The pages in and below `root` that have tables of results."""
    paths = sorted(root.rglob("*.md"))
    return [path for path in paths if _MARKED.search(path.read_text(encoding="utf-8"))]


def with_tables(page: Path) -> str:
    """The text of `page` with its tables made from the results beside it.

    Raises `DataError` for a table without results.
    """
    results = read(page.with_name(FILE), Result) if page.with_name(FILE).is_file() else []

    def with_rows(match: re.Match) -> str:
        rows = [result for result in results if result.table == match[2]]
        if not rows:
            raise DataError(f"{page}: {FILE} has no line of the table {match[2]!r}")
        return f"{match[1]}\n{markdown(table_of(rows))}\n\n{match[4]}"

    return _MARKED.sub(with_rows, page.read_text(encoding="utf-8"))


def table_of(results: Sequence[Result]) -> Table:
    """A row for each result; for each system where no result depends on a seed.

    Numbers are rounded to what their intervals leave certain. "?" is an unknown number of seeds.
    """
    if all(result.seeds == [] for result in results):
        return _by_system(results)
    rows = []
    for result in results:
        deviation, seeds = result.deviation or math.nan, len(result.seeds or ())
        error = deviation / math.sqrt(seeds) if seeds else math.nan
        score = rounded(result.score, result.interval or math.nan)
        if result.interval is None:
            score = f"{result.score:,.{decimals(result.score, error)}f}"
        shown = "-" if math.isnan(deviation) else f"{deviation:.{decimals(deviation, error)}f}"
        known = "?" if result.seeds is None else str(seeds)
        rows.append((result.system, result.metric, known, score, shown))
    return Table(("system", "metric", "seeds", "score ± 95 %", "sd of seeds"), rows)


def _by_system(results: Sequence[Result]) -> Table:
    """A row for each system, a column for each metric."""
    cells = {(result.system, result.metric): rounded(result.score) for result in results}
    metrics = list(dict.fromkeys(result.metric for result in results))
    systems = dict.fromkeys(result.system for result in results)
    rows = [(x, *(cells.get((x, metric), "-") for metric in metrics)) for x in systems]
    return Table(("system", *metrics), rows)


def _key(line: Result | TrainedRun) -> tuple[Any, ...]:
    if isinstance(line, TrainedRun):
        return line.config_sha256, line.seed, line.device
    return line.table, line.system, line.metric


def _as_json(line: Result | TrainedRun) -> str:
    """`line` with its fields before those of its origin."""
    content = to_plain(line)
    origin = {field.name: content.pop(field.name) for field in dataclasses.fields(Origin)}
    return json.dumps(content | origin) + "\n"


def trained_run(folder: Path) -> TrainedRun:
    settings = shared_settings(settings_of(folder))
    config = {name: json.loads(text) for name, text in settings.items()}
    curve = _curve(Run(folder).metrics())
    return TrainedRun(**_origin(folder), seed=seed_of(folder), curve=curve, config=config)


def settings_digest(settings: Mapping[str, str]) -> str:
    """SHA-256 of `settings` without those that the runs of a group may differ in."""
    text = json.dumps(shared_settings(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _origin(folder: Path) -> dict[str, Any]:
    """The fields of `Origin` of the run in `folder`."""
    environment = config_files.read_object(folder / "env.json")
    devices = ", ".join(environment.get("devices", []))
    commit = environment.get("git_commit")
    return {
        "command": environment.get("command"),
        "config_sha256": settings_digest(settings_of(folder)),
        "commit": f"{commit}, changed" if commit and environment.get("git_changed") else commit,
        "versions": {name: environment[name] for name in _VERSIONS if name in environment},
        "device": f"{devices}, {environment.get('cpus', '?')} CPU cores",
        "seconds": seconds_of(environment),
        "date": environment.get("time", "")[:10] or None,
    }


def _curve(lines: list[dict[str, float]]) -> dict[str, list[list[float]]]:
    """At most `_POINTS` points of the loss and of each number of the validation."""
    names = sorted({name for line in lines for name in line if name.startswith("validation_")})
    curve = {}
    for name in ("loss", *names):
        points = [[line["step"], float(f"{line[name]:.5g}")] for line in lines if name in line]
        every = math.ceil(len(points) / _POINTS) or 1
        curve[name] = points[::-every][::-1]  # the last one stays
    return curve


if __name__ == "__main__":
    cli.start(main, {"default": ResultsOptions()}, __doc__, positional="runs")
