"""Times beam search beside its peers: `python -m experiments.benchmarks.decode`.

The peers are transformers and CTranslate2. All read the same Marian model with random weights.
Prints a table and writes RUNS/benchmarks/NAME.json.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.benchmarks import report, translation_subjects
from experiments.benchmarks.environment import environment
from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.subprocesses import Make, compare
from experiments.benchmarks.translation_subjects import Work
from experiments.harness import cli


@dataclass(frozen=True)
class DecodeOptions(TimingConfig):
    """What is decoded, and how often."""

    name: str = "decode"
    work: Work = field(default_factory=Work)
    """The model and the texts."""


PEERS = ("transformers", "CTranslate2", "CTranslate2, two translators")


def main(options: DecodeOptions) -> None:
    """Measures, prints the table and writes the file."""
    where = environment()
    work = options.work
    with TemporaryDirectory() as place:
        folder = Path(place) / "marian"
        translation_subjects.write_model(work, folder)
        found = compare(subjects(work, folder), options, peers=PEERS)
    title = f"{work.rows} texts of {work.target} tokens, beam {work.beams}"
    columns = report.TIMES | {"tokens a second": report.per_second(work.rows * work.target)}
    report.publish(options, where, {title: found}, columns)


def subjects(work: Work, folder: Path) -> dict[str, Make]:
    """Returns what makes each subject."""
    return {
        "ours": partial(translation_subjects.ours, work, folder),
        "ours, int8": partial(translation_subjects.ours, work, folder, "int8"),
        PEERS[0]: partial(translation_subjects.transformers, work, folder),
        PEERS[1]: partial(translation_subjects.ctranslate2, work, folder),
        PEERS[2]: partial(translation_subjects.ctranslate2, work, folder, translators=2),
        f"{PEERS[2]}, int8": partial(
            translation_subjects.ctranslate2, work, folder, dtype="int8", translators=2
        ),
    }


if __name__ == "__main__":
    options = {"default": DecodeOptions()}
    sys.exit(cli.run(lambda: main(cli.parse(options, description=__doc__))))
