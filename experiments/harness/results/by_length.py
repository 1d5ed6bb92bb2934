"""How a score changes as the sentences of the test text grow longer."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int

from experiments.harness.results.comparing import Comparison
from experiments.harness.results.scored_runs import ScoredRun, sample_table
from experiments.harness.results.tables import Table
from jaxformer.errors import ConfigError


def by_length(comparison: Comparison, longest: Sequence[int]) -> Table:
    """A row for each group: the score of source sentences of at most `longest` words each.

    The columns are 1 to longest[0] words, longest[0] + 1 to longest[1], and so on, and the rest.
    With several seeds a cell is their mean and deviation. Raises `ConfigError` for a metric that is
    known of the whole text only.
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
    chosen = np.array([np.searchsorted(edges, lengths) == i + 1 for i in range(len(names))])
    titles = [
        f"{name} ({sum(rows)})" for name, rows in zip(names, chosen, strict=True) if rows.any()
    ]
    rows = [
        [group.name, *(_cell(group.runs, rows) for rows in chosen if rows.any())]
        for group in comparison.groups
    ]
    return Table((f"{comparison.metric} by source words (sentences)", *titles), rows)


def _cell(runs: Sequence[ScoredRun], rows: Bool[np.ndarray, " items"]) -> str:
    scores = np.array([score_of(run, np.flatnonzero(rows)) for run in runs])
    deviation = f" sd {scores.std(ddof=1):.2f}" if len(runs) > 1 else ""
    return f"{scores.mean():.2f}{deviation}"


def score_of(run: ScoredRun, items: Int[np.ndarray, " chosen"]) -> float:
    """The score of the sentences numbered `items`; NaN where it is known of the whole text only."""
    if run.items is None or run.score is None:
        return float("nan")
    return float(run.score(run.items[items].sum(axis=0)[None])[0])
