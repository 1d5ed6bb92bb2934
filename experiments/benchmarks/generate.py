"""Times text generation beside PyTorch: `python -m experiments.benchmarks.generate`.

A GPT continues random prompts with a cache: our compiled program, and a loop over the PyTorch
reference model. Prints a table for each batch size and writes RUNS/benchmarks/NAME.json.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from experiments.benchmarks import generation_subjects, report
from experiments.benchmarks.environment import environment
from experiments.benchmarks.generation_subjects import Work
from experiments.benchmarks.interleaved_timing import Summary, TimingConfig
from experiments.benchmarks.subprocesses import Comparison, Make, compare
from experiments.harness import cli
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class GenerateOptions(TimingConfig):
    """What is generated, and how often."""

    name: str = "generate"
    rows: tuple[int, ...] = (1, 16)
    """Batch sizes; each has a table of its own and replaces `work.rows`."""
    work: Work = field(default_factory=Work)
    """The model and the prompts."""

    def __post_init__(self):
        super().__post_init__()
        if not self.rows:
            raise ConfigError("rows=() measures nothing: give at least one batch size")
        self.works()

    def works(self) -> list[Work]:
        """Returns one for each of `rows`."""
        return [replace(self.work, rows=rows) for rows in self.rows]


PEERS = ("PyTorch loop", "PyTorch loop, one thread")


def main(options: GenerateOptions) -> None:
    """Measures, prints the tables and writes the file.

    Raises `RuntimeError` at the end if greedy texts differ.
    """
    where = environment()
    found = {
        f"{work.rows} x {work.new_tokens} tokens": compare(subjects(work), options, peers=PEERS)
        for work in options.works()
    }
    report.publish(options, where, found, report.TIMES | {"tokens a second": _speed})
    if options.work.temperature == 0:
        for comparison in found.values():
            check_texts(comparison)


def subjects(work: Work) -> dict[str, Make]:
    """Returns what makes each subject."""
    return {
        "ours": partial(generation_subjects.ours, work),
        PEERS[0]: partial(generation_subjects.torch_loop, work),
        PEERS[1]: partial(generation_subjects.torch_loop, work, 1),
    }


def check_texts(comparison: Comparison) -> None:
    """Raises `RuntimeError` unless all subjects wrote the same text."""
    found = {name: facts["checksum"] for name, facts in comparison.facts.items()}
    if len(set(found.values())) > 1:
        raise RuntimeError(
            "the texts differ, so the subjects did not do the same work: "
            + ", ".join(f"{name} {checksum}" for name, checksum in found.items())
        )


def _speed(summary: Summary, facts: Mapping[str, Any]) -> str:
    return f"{facts['tokens'] / summary.median:.0f}"


if __name__ == "__main__":
    options = {"default": GenerateOptions()}
    sys.exit(cli.run(lambda: main(cli.parse(options, description=__doc__))))
