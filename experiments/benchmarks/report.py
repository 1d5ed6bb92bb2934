"""A result as a table in Markdown, and as JSON with all that it depends on."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import runs
from experiments.benchmarks.alternate import Summary
from experiments.benchmarks.children import Comparison

Column = Callable[[Summary, Mapping[str, Any]], str]
"""column(summary, facts) -> the text of a cell."""


def milliseconds(summary: Summary, facts: Mapping[str, Any]) -> str:
    """The median on the wall."""
    return f"{summary.median * 1e3:.1f}"


def least(summary: Summary, facts: Mapping[str, Any]) -> str:
    """The least on the wall, in ms."""
    return f"{summary.least * 1e3:.1f}"


def spread(summary: Summary, facts: Mapping[str, Any]) -> str:
    """The distance between the quartiles."""
    return f"{summary.spread:.0%}"


def processors(summary: Summary, facts: Mapping[str, Any]) -> str:
    """The median of all processors together, in ms."""
    return f"{summary.cpu * 1e3:.1f}"


def ratio(summary: Summary, facts: Mapping[str, Any]) -> str:
    """The median as a share of the best peer's."""
    return "-" if summary.ratio is None else f"{summary.ratio:.2f}"


TIMES: dict[str, Column] = {
    "median, ms": milliseconds,
    "least, ms": least,
    "spread": spread,
    "processors, ms": processors,
    "of the best peer": ratio,
}
"""The columns that every table has."""


def table(comparison: Comparison, columns: Mapping[str, Column]) -> str:
    """A row for each that was measured, and a sentence for each that was not."""
    rows = [
        [name, *(column(found, comparison.facts[name]) for column in columns.values())]
        for name, found in comparison.measured.items()
    ]
    lines = [markdown(["", *columns], rows)]
    lines += [f"not measured: {name}: {why}" for name, why in comparison.missing.items()]
    return "\n".join(lines)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table as Markdown; the first column is text, the others are numbers."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def publish(
    options: Any,
    where: Mapping[str, Any],
    comparisons: Mapping[str, Comparison],
    columns: Mapping[str, Column],
) -> Path:
    """Prints each of `comparisons` under its title, and writes all to the file that is returned.

    It is `options.runs`/benchmarks/`options.name`.json, with the options and with `where`, the
    environment before anything was measured.
    """
    print("; ".join(f"{name} {value}" for name, value in where.items() if value is not None))
    for title, comparison in comparisons.items():
        print(f"\n{title}\n\n{table(comparison, columns)}")
        for line in told(comparison):
            print(line)
    found = {
        "environment": dict(where),
        "options": runs.as_json(options),
        "comparisons": {title: _plain(one) for title, one in comparisons.items()},
    }
    path = Path(options.runs) / "benchmarks" / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"\nall numbers: {path}")
    return path


def told(comparison: Comparison) -> list[str]:
    """The facts of each subject, a line each."""
    return [
        f"{name}: {', '.join(f'{fact} {value}' for fact, value in facts.items())}"
        for name, facts in comparison.facts.items()
        if facts
    ]


def _plain(comparison: Comparison) -> dict[str, Any]:
    measured = {name: found._asdict() for name, found in comparison.measured.items()}
    return comparison._asdict() | {"measured": measured}
