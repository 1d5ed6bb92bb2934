"""Tables of results in pages, between `<!-- results: TABLE -->` and `<!-- end -->`."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from experiments.harness.results.tables import Table, markdown
from experiments.harness.runs.rounding import decimals, rounded
from jaxformer.errors import DataError
from tests.evidence.commands import why_not_repeated
from tests.evidence.records import FILE, Result, read

_MARKED = re.compile(r"(<!-- results: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_LAST_COMMIT = "947ba07"
"""The last commit with the commands of lines that name no commit."""


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
    """The system, with the commit whose command gave its number where today's would not."""
    if not why_not_repeated(result.command, result.commit):
        return result.system
    return f"{result.system} (with {(result.commit or _LAST_COMMIT)[:7]})"
