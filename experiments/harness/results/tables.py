"""Tables of a comparison for a terminal, Markdown, LaTeX and CSV."""

import csv
import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool

from experiments.harness.results.comparing import Comparison
from experiments.harness.results.run_samples import sample_table
from experiments.harness.results.scored_runs import ScoredRun
from experiments.harness.runs import bootstrap
from experiments.harness.runs.quantities import quantity
from experiments.harness.runs.translation_items import can_tell
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError

Format = Literal["terminal", "markdown", "latex", "csv"]


class Table(NamedTuple):
    """Rows of text under their titles; all columns but the first are numbers."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


def render(comparison: Comparison, form: Format = "terminal") -> str:
    """The tables of `comparison`, what they mean, and warnings."""
    tables = [group_table(comparison)]
    if comparison.differences:
        tables.append(difference_table(comparison))
    parts = [write(table, form) for table in tables]
    if form == "csv":
        return "\n".join(parts)
    notes = [*describe(comparison), *warnings(comparison)]
    if form == "terminal":
        notes = [
            textwrap.fill(x, 80, subsequent_indent="  ", break_long_words=False) for x in notes
        ]
    else:
        mark = "-" if form == "markdown" else "%"
        notes = [f"{mark} {note}" for note in notes]
    return "\n\n".join([*parts, "\n".join(notes)])


def write(table: Table, form: Format = "terminal") -> str:
    """`table` as text."""
    return _WRITERS[form](table)


def group_table(comparison: Comparison) -> Table:
    """A row for each group."""
    number = _writer(comparison)
    rows = [
        (
            x.name,
            str(len(x.runs)),
            number(x.mean),
            number(x.deviation),
            number(x.seeds, "±"),
            number(x.items, "±"),
        )
        for x in comparison.groups
    ]
    return Table((comparison.metric, "n", "mean", "sd", "seeds", "items"), rows)


def difference_table(comparison: Comparison) -> Table:
    """A row for each group but the baseline."""
    number = _writer(comparison)
    rows = [
        (
            x.name,
            number(x.value, "+" if x.value > 0 else ""),
            number(x.seeds, "±"),
            number(x.items, "±"),
            number(x.p_value, digits=4),
        )
        for x in comparison.differences
    ]
    base = comparison.groups[0].name
    return Table((f"minus {base}", "difference", "seeds", "items", "p"), rows)


def _writer(comparison: Comparison) -> Callable[..., str]:
    """Writes numbers: with two decimals where scores are of the order of 100, else with four."""
    usual = 2 if max(abs(group.mean) for group in comparison.groups) >= 10 else 4

    def write(value: float, sign: str = "", digits: int = usual) -> str:
        return "-" if math.isnan(value) else f"{sign}{value:.{digits}f}"

    return write


def by_length(comparison: Comparison, longest: Sequence[int]) -> Table:
    """A row for each group: the score of source sentences of at most `longest` words each.

    The columns are 1 to longest[0] words, longest[0] + 1 to longest[1], and so on, and all longer
    ones. With several seeds a cell is their mean and deviation. Raises `ConfigError` for a metric
    that is known of the whole text only.
    """
    edges = [0, *longest]
    if any(after <= before for before, after in pairwise(edges)):
        raise ConfigError(f"by_length={list(longest)}, but the lengths must rise from 1")
    first = comparison.groups[0].runs[0]
    lengths = np.array([len(line.split()) for line in sample_table(first.folder).get("source", [])])
    if first.items is None or len(lengths) != len(first.items):
        raise ConfigError(
            f"by_length needs sentences with a score each, but {comparison.metric} of "
            f"{first.folder} is known of the whole text only: give runs of translation"
        )
    names = [f"{low + 1}-{high}" for low, high in pairwise(edges)] + [f">{edges[-1]}"]
    columns = [np.searchsorted(edges, lengths) == number + 1 for number in range(len(names))]
    shown = [(name, rows) for name, rows in zip(names, columns, strict=True) if rows.any()]
    return Table(
        (
            f"{comparison.metric} by source words (sentences)",
            *(f"{name} ({rows.sum()})" for name, rows in shown),
        ),
        [
            [group.name, *(_score_of(comparison.metric, group.runs, rows) for _, rows in shown)]
            for group in comparison.groups
        ],
    )


def _score_of(metric: str, runs: Sequence[ScoredRun], rows: Bool[np.ndarray, " items"]) -> str:
    """The mean and deviation of the scores of the chosen items.

    "-" where a run has no items, and where the metric says nothing of the chosen ones.
    """
    values = []
    for run in runs:
        if run.items is None or run.score is None or not can_tell(metric, run.items[rows]):
            return "-"
        values.append(float(run.score(run.items[rows].sum(axis=0)[None])[0]))
    scores = np.array(values)
    deviation = f" sd {scores.std(ddof=1):.2f}" if len(runs) > 1 else ""
    return f"{scores.mean():.2f}{deviation}"


def describe(comparison: Comparison) -> list[str]:
    """The text that was scored, and the meaning of the columns."""
    first = comparison.groups[0].runs[0]
    items = "" if first.items is None else f", {len(first.items):,} items"
    lines = [f"{comparison.text} text{items}, SHA-256 {first.digest[:12] or 'unknown'}"]
    if comparison.signature:
        lines.append(comparison.signature)
    if comparison.passed_over:
        usual = quantity(comparison.passed_over).label
        used = quantity(comparison.metric).label
        lines.append(f"{usual} is the same for all runs, so {used} compares them")
    lines.append(
        "n: seeds; sd: deviation of the seeds; seeds, items: halves of 95 % intervals over other "
        f"seeds (t) and test items (bootstrap, {bootstrap.RESAMPLES:,})"
    )
    if comparison.differences:
        lines.append(
            f"p: paired bootstrap ({bootstrap.RESAMPLES:,}) over items, seed {bootstrap.SEED}"
        )
    return lines


def warnings(comparison: Comparison) -> list[str]:
    """A line for each difference that may be noise, or that is not paired."""
    lines = [*comparison.left_out]
    doubtful = [each for each in comparison.differences if each.warning]
    if len(comparison.groups) > 2 and all(len(group.runs) == 1 for group in comparison.groups):
        lines.append(
            "each group has one seed, so the noise of seeds is not known: train at least 3"
        )
        doubtful = [each for each in doubtful if each.value == 0.0]
    lines += [f"{each.name}: {each.warning}" for each in doubtful]
    if comparison.text == "validation":
        lines.append(
            "the validation text also chose the weights: choose settings by it, report a test text"
        )
    return lines + [
        f"{difference.name}: other seeds than {comparison.groups[0].name}, so the runs are not "
        "paired"
        for difference in comparison.differences
        if not difference.paired
    ]


def markdown(table: Table) -> str:
    """`table` in Markdown, without padding, so that a long cell makes no other line longer."""
    rule = ["---", *["---:"] * (len(table.titles) - 1)]
    rows = [[cell.replace("|", r"\|") for cell in row] for row in (table.titles, rule, *table.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plain(table: Table, *, numbers: bool = True) -> str:
    """`table` for a terminal; without `numbers` all columns are text, to the left."""
    # With titles as a row: tabulate makes the columns of a header wider.
    text = _tabulate([table.titles, *table.rows], (), "plain", "right" if numbers else "left")
    return "\n".join(line.rstrip() for line in text.splitlines())


def in_columns(table: Table, width: int | None) -> str:
    """`table` as text in lines of at most `width` columns; None: of any length.

    Where a row is longer, each has a line with its first cell, and the others below it, each after
    its title; "-" is left out.
    """
    text = plain(table, numbers=False)
    if width is None or max(map(len, text.splitlines())) <= width:
        return text
    lines = []
    for name, *cells in table.rows:
        titled = zip(table.titles[1:], cells, strict=True)
        words = ", ".join(f"{title} {cell}" for title, cell in titled if cell != "-")
        lines.append(name)
        lines += textwrap.wrap(words, width, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def _latex(table: Table) -> str:
    text = _tabulate(table.rows, table.titles, "latex_booktabs", "right")
    return re.sub(r"(?<=&) +([-+±][\d.]+)", r" $\1$", text).replace("±", r"\pm ")


def _tabulate(rows: Sequence[Sequence[str]], titles: Sequence[str], form: str, align: str) -> str:
    tabulate = optional_dependencies.load("tabulate").tabulate
    columns = ("left", *[align] * (len(rows[0]) - 1))
    return tabulate(rows, titles, tablefmt=form, disable_numparse=True, colalign=columns)


def _csv(table: Table) -> str:
    out = io.StringIO()
    rows = [[cell.removeprefix("±") for cell in row] for row in (table.titles, *table.rows)]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


_WRITERS: dict[str, Callable[[Table], str]] = {
    "terminal": plain,
    "markdown": markdown,
    "latex": _latex,
    "csv": _csv,
}
