"""Evidence for reported numbers: `python -m experiments.results [RUN|SWEEP ..]`.

With runs: adds a line for each group of them to the results.jsonl of their experiment. Then it
makes the tables of the experiments' pages, which stand between `<!-- results: TABLE -->` and
`<!-- end -->`. A line whose command no longer exists is shown with the commit that has it.
"""

import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness import cli
from experiments.harness.results.comparing import compare
from experiments.harness.results.groups import (
    expand,
    experiment_of,
    settings_of,
    shared_settings,
)
from experiments.harness.results.run_facts import seconds_of
from experiments.harness.results.tables import Table, markdown
from experiments.harness.runs.environment import environment_of
from experiments.harness.runs.rounding import decimals, rounded
from jaxformer.config import from_plain, to_plain
from jaxformer.errors import ConfigError, DataError

ROOT = Path(__file__).parent
FILE = "results.jsonl"
_MARKED = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_VERSIONS = ("python", "jax", "jaxlib", "flax", "optax", "numpy")
_LAST_COMMIT = "947ba07"
"""The last commit with the commands of lines that name no commit."""
_REMOVED_OPTIONS = ("--programs decode", "finetune --run", "finetune --preset", "--training.r_drop")


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
    """Scores, a line each, as in `experiments.runs compare`; none: bleu, bits_per_byte or loss."""
    check: bool = False
    """Changes nothing, and fails where a page has another table than its results make."""


@dataclass(frozen=True, kw_only=True)
class Result:
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
    command: str | None = None
    config_sha256: str | None = None
    """SHA-256 of the settings without seed and name."""
    commit: str | None = None
    versions: dict[str, str] | None = None
    device: str | None = None
    seconds: float | None = None
    """The time of the training and its scores, over all starts, of one seed."""
    date: str | None = None


def main(options: ResultsOptions) -> None:
    """Adds the results and makes the tables."""
    if options.runs and not options.check:
        results = results_of(options.runs, options.table, options.system, options.metrics)
        path = ROOT / experiment_of(expand(options.runs)[0]) / FILE
        append(path, results)
        print(f"{len(results)} results are recorded in {path}")
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


def read(path: Path) -> list[Result]:
    """The results in the file `path`; `DataError` names a line that is none."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            lines.append(from_plain(Result, json.loads(line)))
        except (ValueError, ConfigError) as error:
            raise DataError(f"{path}:{number}: {error}") from error
    return lines


def append(path: Path, new: Sequence[Result]) -> None:
    """Adds a line for each of `new`, in place of one of the same table, system and metric."""
    lines: dict[tuple[str, ...], str] = {}
    if path.is_file():
        known = path.read_text(encoding="utf-8").splitlines(keepends=True)
        lines = dict(zip(map(_key, read(path)), known, strict=True))
    lines |= {_key(line): json.dumps(to_plain(line)) + "\n" for line in new}
    path.write_text("".join(lines.values()), encoding="utf-8")


def pages(root: Path) -> list[Path]:
    """The pages in and below `root` that have tables of results."""
    paths = sorted(root.rglob("*.md"))
    return [path for path in paths if _MARKED.search(path.read_text(encoding="utf-8"))]


def with_tables(page: Path) -> str:
    """The text of `page` with its tables made from the results beside it.

    Raises `DataError` for a table without results.
    """
    results = read(page.with_name(FILE)) if page.with_name(FILE).is_file() else []

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
        rows.append((_shown_system(result), result.metric, known, score, shown))
    return Table(("system", "metric", "seeds", "score ± 95 %", "sd of seeds"), rows)


def _by_system(results: Sequence[Result]) -> Table:
    """A row for each system, a column for each metric."""
    shown = {result.system: _shown_system(result) for result in results}
    cells = {(result.system, result.metric): rounded(result.score) for result in results}
    metrics = list(dict.fromkeys(result.metric for result in results))
    rows = [(shown[x], *(cells.get((x, metric), "-") for metric in metrics)) for x in shown]
    return Table(("system", *metrics), rows)


def _shown_system(result: Result) -> str:
    """The system, with the commit that has its command where this one does not."""
    command = result.command or ""
    modules = [word for word in command.split() if word.startswith("experiments.")]
    gone = any(option in command for option in _REMOVED_OPTIONS)
    if not gone and all(_exists(module.partition(":")[0]) for module in modules):
        return result.system
    return f"{result.system} (with {(result.commit or _LAST_COMMIT)[:7]})"


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _key(line: Result) -> tuple[str, ...]:
    return line.table, line.system, line.metric


def settings_digest(settings: Mapping[str, str]) -> str:
    """SHA-256 of `settings` without those that the runs of a group may differ in."""
    text = json.dumps(shared_settings(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _origin(folder: Path) -> dict[str, Any]:
    """The command, code and machine of the run in `folder`."""
    environment = environment_of(folder).read()
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


if __name__ == "__main__":
    cli.start(main, {"default": ResultsOptions()}, __doc__, positional="runs")
