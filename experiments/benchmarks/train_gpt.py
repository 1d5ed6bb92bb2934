"""Times a training step of a GPT beside PyTorch's: `python -m experiments.benchmarks.train_gpt`.

The peers are the PyTorch reference model and, with `--nanogpt FOLDER`, nanoGPT's model from a
checkout, eager and compiled. Prints a table and writes RUNS/benchmarks/NAME.json.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from experiments.benchmarks import gpt_subjects, report
from experiments.benchmarks.environment import environment
from experiments.benchmarks.gpt_subjects import AttentionName, Sizes
from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.subprocesses import Make, compare
from experiments.harness import cli


@dataclass(frozen=True)
class TrainOptions(TimingConfig):
    """What is trained, and how often."""

    name: str = "nanogpt_cpu"
    rounds: int = 20
    repetitions: int = 10
    warm_up: int = 10
    sizes: Sizes = field(default_factory=Sizes)
    """The model and the batch."""
    attention_fn: AttentionName = "reference"
    """The attention function of our model."""
    nanogpt: Path | None = None
    """Folder of a checkout of nanoGPT. None: nanoGPT is not measured."""


_CHARACTERS_10M = Sizes(
    num_layers=6, num_heads=6, d_model=384, length=256, rows=4, dropout_rate=0.2
)
PRESETS = {
    "nanogpt_cpu": TrainOptions(),
    "characters_10m": TrainOptions(
        name="characters_10m", sizes=_CHARACTERS_10M, rounds=10, repetitions=3, warm_up=3
    ),
}


def main(options: TrainOptions) -> None:
    """Measures, prints the table and writes the file."""
    where = environment()
    found = compare(subjects(options), options, peers=PEERS)
    if options.nanogpt is None:
        why = "give the folder of a checkout of nanoGPT, --nanogpt FOLDER"
        found = found._replace(missing=found.missing | {"nanoGPT": why})
    report.publish(options, where, {"a training step": found}, report.TIMES)


PEERS = ("nanoGPT, torch.compile", "nanoGPT, eager", "PyTorch reference, eager")


def subjects(options: TrainOptions) -> dict[str, Make]:
    """Returns what makes each subject."""
    sizes, folder = options.sizes, options.nanogpt
    makes: dict[str, Make] = {"ours": partial(gpt_subjects.ours, sizes, options.attention_fn)}
    if folder is not None:
        makes[PEERS[0]] = partial(gpt_subjects.nanogpt, sizes, folder, True)
        makes[PEERS[1]] = partial(gpt_subjects.nanogpt, sizes, folder, False)
    return makes | {PEERS[2]: partial(gpt_subjects.torch_reference, sizes)}


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(cli.parse(PRESETS, description=__doc__))))
