"""Records reported numbers, for those who change this project: `python -m tests.evidence [RUN ..]`.

With runs or sweeps: adds a line for each group of them to the results.jsonl of their experiment,
and what their command sets to recorded_settings.json. Then it makes the tables of the experiments'
pages, which stand between `<!-- results: TABLE -->` and `<!-- end -->`. A line whose command does
not do today what it did is shown with its commit.
"""

from dataclasses import dataclass
from pathlib import Path

import experiments
from experiments.harness import cli
from experiments.harness.results.find_runs import expand
from experiments.harness.results.run_settings import experiment_of
from jaxformer.errors import ConfigError, DataError
from tests.evidence import commands, pages, records

ROOT = Path(experiments.__file__).parent


@dataclass(frozen=True)
class EvidenceOptions:
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


def main(options: EvidenceOptions, root: Path = ROOT) -> None:
    """Adds the results and makes the tables of the pages below `root`."""
    if options.runs and not options.check:
        results = records.results_of(options.runs, options.table, options.system, options.metrics)
        path = root / experiment_of(expand(options.runs)[0]) / records.FILE
        records.append(path, results)
        print(f"{len(results)} results are recorded in {path}")
        for command, commit in {(result.command, result.commit) for result in results}:
            record_settings(command, commit)
    for page in pages.pages(root):
        text = pages.with_tables(page)
        if text == page.read_text(encoding="utf-8"):
            continue
        if options.check:
            raise DataError(
                f"{page} has a table that its results do not make: run python -m tests.evidence"
            )
        page.write_text(text, encoding="utf-8")
        print(f"the tables of {page} are made anew")


def record_settings(command: str | None, commit: str | None) -> None:
    """Records what `command` sets; says so where it is no command of today's code."""
    try:
        commands.record(command or "", commit or "")
    except ConfigError as error:
        print(f"its settings are not recorded: {error}")


if __name__ == "__main__":
    cli.start(main, {"default": EvidenceOptions()}, __doc__, positional="runs")
