"""One page of several runs: `python -m experiments.report RUN|SWEEP .. --output report.html`.

The page is one file that needs no network: scores with intervals and tests, curves with bands over
the seeds, samples side by side, the settings that differ.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results.comparison_formats import page
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class ReportOptions:
    """Which runs, and where the page goes."""

    runs: tuple[str, ...] = ()
    """Folders of runs, or folders with runs below them, as of a sweep."""
    output: str = "report.html"
    """File of the page."""
    metric: str = ""
    """The score that is compared, as in experiments.compare."""
    baseline: str = ""
    """The run whose group the others are compared with; empty: the first."""


def main(options: ReportOptions) -> None:
    """Writes the page."""
    if not options.runs:
        raise ConfigError("no runs were given: give their folders, RUN RUN, or that of a sweep")
    output = Path(options.output)
    output.write_text(page(options.runs, options.metric, options.baseline), encoding="utf-8")
    print(f"see {output} ({output.stat().st_size:,} bytes)")


if __name__ == "__main__":
    cli.start(main, {"default": ReportOptions()}, __doc__, positional="runs")
