"""Evidence for reported numbers: `python -m experiments.results [RUN|SWEEP ..]`.

With runs: adds a line for each group of them to the results.jsonl of their experiment, and one for
each run to its runs.jsonl. Then makes the tables of the experiments' pages from these files.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results import evidence
from experiments.harness.results.groups import expand, experiment_of
from jaxformer.errors import DataError

ROOT = Path(__file__).parent


@dataclass(frozen=True)
class ResultsOptions:
    """Which runs are recorded, and how they are called."""

    runs: tuple[str, ...] = ()
    """Folders of runs, or folders with runs below them; none: only the tables are made."""
    table: str = "quality"
    """The table of the experiment's page that shows them."""
    system: str = ""
    """What was scored, in words; empty: the name of the run."""
    metrics: tuple[str, ...] = ()
    """Scores, a line each, as in experiments.compare; none: its own choice."""
    check: bool = False
    """Changes nothing, and fails where a page has another table than its results make."""


def main(options: ResultsOptions) -> None:
    """Adds the results and makes the tables."""
    if options.runs and not options.check:
        found = evidence.results_of(options.runs, options.table, options.system, options.metrics)
        trained = evidence.trained_runs(options.runs)
        folder = ROOT / experiment_of(expand(options.runs)[0])
        evidence.append(folder / evidence.FILE, found)
        evidence.append(folder / evidence.RUNS_FILE, trained)
        print(f"{len(found)} results of {len(trained)} runs are recorded in {folder}")
    for page in evidence.pages(ROOT):
        text = evidence.with_tables(page)
        if text == page.read_text(encoding="utf-8"):
            continue
        if options.check:
            raise DataError(
                f"{page} has a table that its results do not make: run "
                "python -m experiments.results"
            )
        page.write_text(text, encoding="utf-8")
        print(f"the tables of {page} are made anew")


if __name__ == "__main__":
    cli.start(main, {"default": ResultsOptions()}, __doc__, positional="runs")
