"""Beam search beside `transformers` and CTranslate2: `python -m experiments.benchmarks.decode`.

One Marian-shaped model of random weights, read by all from one folder; each in a process of
its own, in turn. Prints a table and writes runs/benchmarks.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments import commands
from experiments.benchmarks import report, translators
from experiments.benchmarks.alternate import Summary
from experiments.benchmarks.children import Make, compare
from experiments.benchmarks.environment import environment
from experiments.benchmarks.translators import Work
from jaxformer.config import check_least


@dataclass(frozen=True)
class DecodeOptions:
    """What is decoded, and how often: `rounds` of `batches` each, after `warm_up`."""

    name: str = "decode"
    work: Work = field(default_factory=Work)
    rounds: int = 7
    batches: int = 1
    warm_up: int = 1
    runs: str = "runs"

    def __post_init__(self):
        check_least(self, 1, "rounds", "batches", "warm_up")


PEERS = ("transformers", "CTranslate2", "CTranslate2, in two parts")


def main(options: DecodeOptions) -> None:
    """Measures, prints the table and writes the file."""
    where = environment()
    work = options.work
    with TemporaryDirectory() as place:
        folder = Path(place) / "marian"
        translators.write_model(work, folder)
        found = compare(
            subjects(work, folder),
            peers=PEERS,
            rounds=options.rounds,
            count=options.batches,
            warm_up=options.warm_up,
        )

    def speed(summary: Summary, facts: Mapping[str, Any]) -> str:
        return f"{work.rows * work.target / summary.median:.0f}"

    title = f"{work.rows} texts of {work.target} tokens, beam {work.beams}"
    report.publish(options, where, {title: found}, report.TIMES | {"tokens a second": speed})


def subjects(work: Work, folder: Path) -> dict[str, Make]:
    """What makes each of those that are measured, in a process of its own."""
    return {
        "ours": partial(translators.ours, work, folder),
        "ours, int8": partial(translators.ours, work, folder, "int8"),
        PEERS[0]: partial(translators.transformers, work, folder),
        PEERS[1]: partial(translators.ctranslate2, work, folder),
        PEERS[2]: partial(translators.ctranslate2, work, folder, parts=2),
        f"{PEERS[2]}, int8": partial(translators.ctranslate2, work, folder, dtype="int8", parts=2),
    }


if __name__ == "__main__":
    options = {"default": DecodeOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
