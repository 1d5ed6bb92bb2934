"""Compare runs: `python -m experiments.compare RUN|SWEEP ..`.

Runs whose settings differ in the seed alone are one row: mean, deviation and 95 % intervals of a
score of the test text, and the difference from the first row with tests. The weights of each run
are those that its validation chose.
"""

from dataclasses import dataclass

from experiments.harness import cli
from experiments.harness.results import tables
from experiments.harness.results.by_length import by_length
from experiments.harness.results.comparing import compare
from experiments.harness.results.tables import Format
from jaxformer.config import check_choices
from jaxformer.errors import ConfigError

__all__ = ["CompareOptions", "compare", "main"]


@dataclass(frozen=True)
class CompareOptions:
    """Which runs, by which score, and how it is written."""

    runs: tuple[str, ...] = ()
    """Folders of runs, or folders with runs below them, as of a sweep."""
    metric: str = ""
    """A number of scores.json, such as bleu, chrf, exact, lowercased.bleu, loss, bits_per_byte, or
    of the validation, such as validation_loss; empty: bleu, bits_per_byte or loss."""
    baseline: str = ""
    """The run whose group the others are compared with; empty: the first."""
    format: Format = "terminal"
    """How the tables are written."""
    all: bool = False
    """Adds a table of every run with its seed and score."""
    by_length: tuple[int, ...] = ()
    """Adds a table of translations by the words of the source, such as 10 15 20: 1 to 10, 11 to
    15, 16 to 20, and the rest."""

    def __post_init__(self):
        check_choices(self)


def main(options: CompareOptions) -> None:
    """Prints the tables."""
    if not options.runs:
        raise ConfigError("no runs were given: give their folders, RUN RUN, or that of a sweep")
    found = compare(options.runs, options.metric, options.baseline)
    print(tables.render(found, options.format, every_run=options.all))
    if options.by_length:
        print("\n" + tables.write(by_length(found, options.by_length), options.format))


if __name__ == "__main__":
    cli.start(main, {"default": CompareOptions()}, __doc__, positional="runs")
