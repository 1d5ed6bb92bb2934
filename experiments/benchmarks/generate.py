"""A GPT's text beside a PyTorch loop's: `python -m experiments.benchmarks.generate`.

The 10.65 M character model of random weights continues random prompts, by our compiled program and
by a loop over the PyTorch twin, both with a cache; each in a process of its own, in turn. Prints a
table for each number of rows and writes runs/benchmarks.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from experiments import commands
from experiments.benchmarks import generators, report
from experiments.benchmarks.alternate import Summary
from experiments.benchmarks.children import Comparison, Make, compare
from experiments.benchmarks.environment import environment
from experiments.benchmarks.generators import Work
from jaxformer.config import ConfigError, check_least


@dataclass(frozen=True)
class GenerateOptions:
    """How many `rows` of `work` at a time, in `rounds` of `texts` each, after `warm_up`.

    The rows in `work` itself have no meaning.
    """

    name: str = "generate"
    rows: tuple[int, ...] = (1, 16)
    work: Work = field(default_factory=Work)
    rounds: int = 7
    texts: int = 1
    warm_up: int = 1
    runs: str = "runs"

    def __post_init__(self):
        check_least(self, 1, "rounds", "texts", "warm_up")
        if not self.rows:
            raise ConfigError("rows=() measures nothing: give at least one")
        self.works()

    def works(self) -> list[Work]:
        """One for each of `rows`."""
        return [replace(self.work, rows=rows) for rows in self.rows]


PEERS = ("PyTorch loop", "PyTorch loop, one thread")


def main(options: GenerateOptions) -> None:
    """Measures, prints the tables and writes the file.

    Raises `RuntimeError` at the end where the likeliest tokens differ.
    """
    where, found = environment(), {}
    for work in options.works():
        found[f"{work.rows} x {work.made} tokens"] = compare(
            subjects(work),
            peers=PEERS,
            rounds=options.rounds,
            count=options.texts,
            warm_up=options.warm_up,
        )
    report.publish(options, where, found, report.TIMES | {"tokens a second": _speed})
    if options.work.temperature == 0:
        for comparison in found.values():
            check_texts(comparison)


def subjects(work: Work) -> dict[str, Make]:
    """What makes each of those that are measured, in a process of its own."""
    return {
        "ours": partial(generators.ours, work),
        PEERS[0]: partial(generators.torch_loop, work),
        PEERS[1]: partial(generators.torch_loop, work, 1),
    }


def check_texts(comparison: Comparison) -> None:
    """Raises `RuntimeError` unless all that were measured wrote the same."""
    found = {name: facts["checksum"] for name, facts in comparison.facts.items()}
    if len(set(found.values())) > 1:
        raise RuntimeError(
            "the texts differ, so that the rows did not do the same work: "
            + ", ".join(f"{name} {checksum}" for name, checksum in found.items())
        )


def _speed(summary: Summary, facts: Mapping[str, Any]) -> str:
    return f"{facts['tokens'] / summary.median:.0f}"


if __name__ == "__main__":
    options = {"default": GenerateOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
