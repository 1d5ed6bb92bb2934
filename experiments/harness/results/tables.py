"""Tables of a comparison for a terminal, Markdown, LaTeX and CSV."""

import csv
import io
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from experiments.harness.results import statistics
from experiments.harness.results.comparing import Comparison, Difference, GroupScore

Format = Literal["terminal", "markdown", "latex", "csv"]
FORMATS = get_args(Format)


class Table(NamedTuple):
    """Rows of text under their titles; all columns but the first are numbers."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]


def render(comparison: Comparison, form: Format = "terminal", *, every_run: bool = False) -> str:
    """The tables of `comparison`, what they mean, and warnings; `every_run` adds each seed's."""
    tables = [group_table(comparison)]
    tables += [difference_table(comparison)] if comparison.differences else []
    tables += [run_table(comparison)] if every_run else []
    parts = [write(table, form) for table in tables]
    if form == "csv":
        return "\n".join(parts)
    told = [*describe(comparison), *warnings(comparison)]
    return "\n\n".join([*parts, _NOTES[form](told)])


def write(table: Table, form: Format) -> str:
    """`table` as text."""
    return _WRITERS[form](table)


def group_table(comparison: Comparison) -> Table:
    """A row for each group."""
    digits = _digits(comparison)
    titles = comparison.metric, "n", "mean", "sd", "seeds", "items", "both"
    return Table(titles, [_group_row(group, digits) for group in comparison.groups])


def difference_table(comparison: Comparison) -> Table:
    """A row for each group but the baseline."""
    digits = _digits(comparison)
    titles = f"minus {comparison.groups[0].name}", "difference", "seeds", "items", "both"
    rows = [_difference_row(found, digits) for found in comparison.differences]
    return Table((*titles, "p bs", "p ar"), rows)


def run_table(comparison: Comparison) -> Table:
    """A row for each run."""
    digits = _digits(comparison)
    rows = [
        (
            str(run.folder),
            str(run.seed),
            _number(run.value, digits),
            "+".join(map(str, run.steps)),
        )
        for group in comparison.groups
        for run in group.runs
    ]
    return Table(("run", "seed", comparison.metric, "steps"), rows)


def describe(comparison: Comparison) -> list[str]:
    """What the columns are."""
    first = comparison.groups[0].runs[0]
    items = "" if first.items is None else f", {len(first.items):,} items"
    lines = [f"{comparison.text} text{items}, SHA-256 {first.digest[:12] or 'unknown'}"]
    lines += [comparison.signature] if comparison.signature else []
    lines += [
        "n: seeds; sd: deviation of the seeds; the rest: halves of 95 % intervals over other "
        f"seeds (t), test items (bootstrap, {statistics.RESAMPLES:,}), and both"
    ]
    if comparison.differences:
        lines += [
            f"p: paired bootstrap ({statistics.RESAMPLES:,}) and approximate randomisation "
            f"({statistics.TRIALS:,}) over items, seed {statistics.SEED}"
        ]
    return lines


def warnings(comparison: Comparison) -> list[str]:
    """A line for each difference that may be noise, or that is not paired."""
    lines = [f"{d.name}: {d.warning}" for d in comparison.differences if d.warning]
    if comparison.text == "validation":
        lines.append("the validation text also chose the weights: give the runs a test text")
    return lines + [
        f"{found.name}: other seeds than {comparison.groups[0].name}, so the runs are not paired"
        for found in comparison.differences
        if not found.paired
    ]


def _digits(comparison: Comparison) -> int:
    """Decimals of the scores: two where they are of the order of 100, else four."""
    return 2 if max(abs(group.mean) for group in comparison.groups) >= 10 else 4


def _group_row(group: GroupScore, digits: int) -> list[str]:
    halves = (_number(x, digits, "±") for x in (group.seeds, group.items, group.both))
    mean, deviation = _number(group.mean, digits), _number(group.deviation, digits)
    return [group.name, str(len(group.runs)), mean, deviation, *halves]


def _difference_row(found: Difference, digits: int) -> list[str]:
    halves = (_number(x, digits, "±") for x in (found.seeds, found.items, found.both))
    p_values = (_number(p, 4) for p in (found.p_bootstrap, found.p_randomization))
    sign = "+" if found.value > 0 else ""
    return [found.name, _number(found.value, digits, sign), *halves, *p_values]


def _number(value: float, digits: int, sign: str = "") -> str:
    return "-" if math.isnan(value) else f"{sign}{value:.{digits}f}"


def _terminal(table: Table) -> str:
    rows = [table.titles, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def markdown(table: Table) -> str:
    rule = ["---", *["---:"] * (len(table.titles) - 1)]
    rows = [table.titles, rule, *table.rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows
    )


def _latex(table: Table) -> str:
    lines = [" & ".join(map(_escaped, row)) + r" \\" for row in (table.titles, *table.rows)]
    columns = "l" + "r" * (len(table.titles) - 1)
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:]]
        + [r"\bottomrule", r"\end{tabular}"]
    )


def _escaped(text: str) -> str:
    """`text` as LaTeX prints it."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    text = "".join(special.get(character, character) for character in text)
    if text[:1] in ("±", "+", "-") and text[1:]:
        return f"${text.replace('±', chr(92) + 'pm ')}$"
    return text


def _csv(table: Table) -> str:
    out = io.StringIO()
    rows = [[cell.removeprefix("±") for cell in row] for row in (table.titles, *table.rows)]
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


_WRITERS: dict[str, Callable[[Table], str]] = {
    "terminal": _terminal,
    "markdown": markdown,
    "latex": _latex,
    "csv": _csv,
}
_NOTES: dict[str, Callable[[list[str]], str]] = {
    "terminal": lambda lines: "\n".join(
        textwrap.fill(line, 80, subsequent_indent="  ", break_long_words=False) for line in lines
    ),
    "markdown": lambda lines: "\n".join(f"- {line}" for line in lines),
    "latex": lambda lines: "\n".join(f"% {line}" for line in lines),
}
