"""Reported results: a line of results.jsonl for each number, and the tables made from them.

A line of runs.jsonl is a run that such a number is made of, with its settings and its curve.

A table of a page stands between `<!-- results: NAME -->` and `<!-- end -->`; NAME is the `table` of
its lines, which are in the results.jsonl of the page's folder.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from experiments.harness.cli import config_files
from experiments.harness.results.comparing import GroupScore, compare
from experiments.harness.results.groups import expand, seed_of, shared_settings
from experiments.harness.results.scored_runs import validation_names
from experiments.harness.results.tables import Table, markdown
from experiments.harness.runs.run_folder import Run
from jaxformer.errors import ConfigError, DataError

FILE = "results.jsonl"
RUNS_FILE = "runs.jsonl"
_MARKED = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_VERSIONS = ("python", "jax", "jaxlib", "flax", "optax", "numpy")
_POINTS = 50
"""Points of a curve; more are thinned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A reported number and where it comes from; None is what is not known."""

    table: str
    """The table that shows it."""
    system: str
    """What was scored, in words."""
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
    """Of the scores of the seeds (n - 1)."""
    text: str | None = None
    """The part of the text that was scored."""
    text_sha256: str | None = None
    signature: str | None = None
    """sacreBLEU's signature."""
    command: str | None = None
    config_sha256: str | None = None
    """Of the settings without seed and name."""
    commit: str | None = None
    versions: dict[str, str] | None = None
    device: str | None = None
    seconds: float | None = None
    """Of the training and its scores, of one seed."""
    date: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run that results are made of; `config_sha256` and `seed` tell which one."""

    config_sha256: str
    seed: int
    command: str | None = None
    commit: str | None = None
    versions: dict[str, str] | None = None
    device: str | None = None
    seconds: float | None = None
    """Of the training and its scores, over all starts."""
    date: str | None = None
    curve: dict[str, list[list[float]]]
    """Points [step, value] of the training loss and of each score of the validation."""
    config: dict[str, Any]
    """The settings by their dotted names, without seed and name."""


Line = TypeVar("Line", Result, TrainedRun)


def results_of(
    paths: Iterable[str | Path], table: str, system: str = "", metrics: Iterable[str] = ()
) -> list[Result]:
    """A result for each group of the runs in `paths` and each of `metrics` (see `compare`)."""
    paths, found = list(paths), []
    for metric in list(metrics) or [""]:
        compared = compare(paths, metric)
        for group in compared.groups:
            name = system if len(compared.groups) == 1 else f"{system} {group.name}"
            found.append(_result(group, table, name.strip() or group.name, compared.metric))
    return found


def trained_runs(paths: Iterable[str | Path]) -> list[TrainedRun]:
    """The runs in `paths`, each a run's folder or one with runs below it."""
    return [
        TrainedRun(
            **_origin(folder),
            seed=seed_of(folder),
            curve=_curve(folder),
            config={name: json.loads(text) for name, text in shared_settings(folder).items()},
        )
        for folder in expand(list(paths), finished=True)
    ]


def read(path: Path, kind: type[Line]) -> list[Line]:
    """The results, or runs, in the file `path`; `DataError` names a line that is none."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(config_files.build(kind, json.loads(line)))
        except (ValueError, ConfigError) as error:
            raise DataError(f"{path}:{number}: {error}") from error
    return found


def append(path: Path, new: Sequence[Line]) -> None:
    """Adds a line for each of `new`, in place of one of the same table, system and metric, or of
    the same settings and seed."""
    known: list[Line] = read(path, type(new[0])) if new and path.is_file() else []
    lines = {_key(line): line for line in (*known, *new)}
    texts = (json.dumps(config_files.plain(line)) + "\n" for line in lines.values())
    path.write_text("".join(texts), encoding="utf-8")


def _key(line: Result | TrainedRun) -> tuple[str | int, ...]:
    if isinstance(line, TrainedRun):
        return line.config_sha256, line.seed
    return line.table, line.system, line.metric


def with_tables(page: Path) -> str:
    """The text of `page` with its tables made from the results beside it.

    Raises `DataError` for a table without results.
    """
    results = read(page.with_name(FILE), Result) if page.with_name(FILE).is_file() else []

    def made(match: re.Match) -> str:
        rows = [result for result in results if result.table == match[2]]
        if not rows:
            raise DataError(f"{page}: {FILE} has no line of the table {match[2]!r}")
        return f"{match[1]}\n{markdown(table_of(rows))}\n\n{match[4]}"

    return _MARKED.sub(made, page.read_text(encoding="utf-8"))


def pages(root: Path) -> list[Path]:
    """The pages in and below `root` that have such tables."""
    found = sorted(root.rglob("*.md"))
    return [path for path in found if _MARKED.search(path.read_text(encoding="utf-8"))]


def table_of(results: Iterable[Result]) -> Table:
    """A row for each result; for each system where no result depends on a seed."""
    results = list(results)
    if all(result.seeds == [] for result in results):
        return _by_system(results)
    rows = [
        (
            result.system,
            result.metric,
            "?" if result.seeds is None else str(len(result.seeds)),
            _shown(result.score, result),
            _shown(result.deviation, result),
            _shown(result.interval, result),
        )
        for result in results
    ]
    return Table(("system", "metric", "seeds", "mean", "sd", "± 95 %"), rows)


def _by_system(results: list[Result]) -> Table:
    """A row for each system, a column for each metric."""
    found = {(result.system, result.metric): result for result in results}
    metrics = list(dict.fromkeys(result.metric for result in results))
    rows = []
    for system in dict.fromkeys(result.system for result in results):
        numbers = (found.get((system, metric)) for metric in metrics)
        rows.append((system, *("-" if x is None else _shown(x.score, x) for x in numbers)))
    return Table(("system", *metrics), rows)


def _shown(value: float | None, result: Result) -> str:
    """`value` with the score's decimals: at most four, two from 10 on and none from 1,000."""
    if value is None:
        return "-"
    size = abs(result.score)
    most = 0 if size >= 1_000 else 2 if size >= 10 else 4
    known = len(repr(result.score).partition(".")[2])
    return f"{value:,.{min(most, known)}f}"


def _result(group: GroupScore, table: str, system: str, metric: str) -> Result:
    first = group.runs[0]
    return Result(
        table=table,
        system=system,
        metric=metric,
        score=group.mean,
        interval=_known(group.items),
        seeds=[run.seed for run in group.runs],
        scores=[run.value for run in group.runs],
        deviation=_known(group.deviation),
        text=first.text,
        text_sha256=first.digest or None,
        signature=first.signature or None,
        **_origin(first.folder),
    )


def _origin(folder: Path) -> dict[str, Any]:
    """What the run in `folder` says of where it comes from."""
    environment = config_files.read_object(folder / "env.json")
    devices = ", ".join(environment.get("devices", []))
    text = json.dumps(shared_settings(folder), sort_keys=True)
    return {
        "command": environment.get("command"),
        "config_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "commit": _commit(environment),
        "versions": {name: environment[name] for name in _VERSIONS if name in environment},
        "device": f"{devices}, {environment.get('cpus', '?')} CPU cores",
        "seconds": _seconds(folder, environment),
        "date": environment.get("time", "")[:10] or None,
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _commit(environment: dict[str, Any]) -> str | None:
    """The commit of the code; "changed" is added where the files were not those of the commit."""
    commit = environment.get("git_commit")
    return f"{commit}, changed" if commit and environment.get("git_changed") else commit


def _seconds(folder: Path, environment: dict[str, Any]) -> float | None:
    """The time of a training and its scores; None where a start does not say how long it was."""
    earlier = [start.get("seconds") for start in environment.get("earlier", [])]
    if None in earlier or "time" not in environment:
        return None
    started = datetime.fromisoformat(environment["time"]).timestamp()
    return float(round(sum(earlier) + (folder / "scores.json").stat().st_mtime - started))


def _curve(folder: Path) -> dict[str, list[list[float]]]:
    lines = Run(folder).metrics()
    found = {}
    for name in ("loss", *validation_names(lines)):
        points = [[line["step"], float(f"{line[name]:.5g}")] for line in lines if name in line]
        every = math.ceil(len(points) / _POINTS) or 1
        found[name] = points[::-every][::-1]  # the last one stays
    return found
