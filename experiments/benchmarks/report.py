"""Results as tables in Markdown, and as JSON with options and environment."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.interleaved_timing import Summary, TimingConfig
from experiments.benchmarks.subprocesses import Comparison
from experiments.harness import run_folder

Column = Callable[[Summary, Mapping[str, Any]], str]
"""column(summary, facts) -> the text of a cell."""


def ratio(summary: Summary, facts: Mapping[str, Any]) -> str:
    """Returns the median divided by that of the fastest peer."""
    return "-" if summary.ratio is None else f"{summary.ratio:.2f}"


TIMES: dict[str, Column] = {
    "median, ms": lambda summary, facts: f"{summary.median * 1e3:.1f}",
    "least, ms": lambda summary, facts: f"{summary.least * 1e3:.1f}",
    "spread": lambda summary, facts: f"{summary.spread:.0%}",
    "processors, ms": lambda summary, facts: f"{summary.cpu * 1e3:.1f}",
    "of the best peer": ratio,
}
"""The columns of every table."""


def per_second(tokens: int) -> Column:
    """Returns the column of `tokens` divided by the median time."""
    return lambda summary, facts: f"{tokens / summary.median:.0f}"


def table(comparison: Comparison, columns: Mapping[str, Column]) -> str:
    """Returns a row for each subject that was measured, and a line for each that was not."""
    rows = [
        [name, *(column(found, comparison.facts[name]) for column in columns.values())]
        for name, found in comparison.measured.items()
    ]
    lines = [markdown(["", *columns], rows)]
    lines += [f"not measured: {name}: {why}" for name, why in comparison.missing.items()]
    return "\n".join(lines)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is text, the others are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def publish(
    options: TimingConfig,
    where: Mapping[str, Any],
    comparisons: Mapping[str, Comparison],
    columns: Mapping[str, Column],
) -> Path:
    """Prints `comparisons` under their titles, writes them to a file, and returns its path.

    The file is RUNS/benchmarks/NAME.json, with the options and with `where`, the environment
    before the first measurement.
    """
    print("; ".join(f"{name} {value}" for name, value in where.items() if value is not None))
    for title, comparison in comparisons.items():
        print(f"\n{title}\n\n{table(comparison, columns)}")
        for line in fact_lines(comparison):
            print(line)
    found = {
        "environment": dict(where),
        "options": run_folder.as_json(options),
        "comparisons": {title: _plain(one) for title, one in comparisons.items()},
    }
    path = Path(options.runs) / "benchmarks" / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"\nall numbers: {path}")
    return path


def fact_lines(comparison: Comparison) -> list[str]:
    """Returns the facts of each subject, one line each."""
    return [
        f"{name}: {', '.join(f'{fact} {value}' for fact, value in facts.items())}"
        for name, facts in comparison.facts.items()
        if facts
    ]


def _plain(comparison: Comparison) -> dict[str, Any]:
    measured = {name: found._asdict() for name, found in comparison.measured.items()}
    return comparison._asdict() | {"measured": measured}
