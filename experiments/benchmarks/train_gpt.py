"""A training step beside PyTorch's: `python -m experiments.benchmarks.train_gpt --nanogpt FOLDER`.

Ours, our PyTorch twin and, where FOLDER is a checkout of nanoGPT, its model, eager and through
torch.compile; each in a process of its own, in turn. Prints a table and writes runs/benchmarks.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from experiments import commands
from experiments.benchmarks import gpts, report
from experiments.benchmarks.children import Make, compare
from experiments.benchmarks.environment import environment
from experiments.benchmarks.gpts import Sizes
from jaxformer import kernels
from jaxformer.config import ConfigError, check_least


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, and how long it is looked at: `rounds` of `steps` each, after `warm_up`.

    `nanogpt` is the folder of nanoGPT's model.py.
    """

    name: str = "nanogpt_cpu"
    sizes: Sizes = field(default_factory=Sizes)
    attention: str = "reference"
    nanogpt: Path | None = None
    rounds: int = 20
    steps: int = 10
    warm_up: int = 10
    runs: str = "runs"

    def __post_init__(self):
        check_least(self, 1, "rounds", "steps", "warm_up")
        if self.attention not in kernels.KERNELS:
            known = ", ".join(kernels.KERNELS)
            raise ConfigError(f"attention={self.attention!r} is no kernel: choose one of {known}")


_CHARACTERS_10M = Sizes(
    num_layers=6, num_heads=6, d_model=384, length=256, rows=4, dropout_rate=0.2
)
PRESETS = {
    "nanogpt_cpu": TrainOptions(),
    "characters_10m": TrainOptions(
        name="characters_10m", sizes=_CHARACTERS_10M, rounds=10, steps=3, warm_up=3
    ),
}


def main(options: TrainOptions) -> None:
    """Measures, prints the table and writes the file."""
    where = environment()
    found = compare(
        subjects(options),
        peers=PEERS,
        rounds=options.rounds,
        count=options.steps,
        warm_up=options.warm_up,
    )
    if options.nanogpt is None:
        why = "give the folder of a checkout of nanoGPT, --nanogpt FOLDER"
        found = found._replace(missing=found.missing | {"nanoGPT": why})
    report.publish(options, where, {"a training step": found}, report.TIMES)


PEERS = ("nanoGPT, torch.compile", "nanoGPT, eager", "PyTorch twin, eager")


def subjects(options: TrainOptions) -> dict[str, Make]:
    """What makes each of those that are measured, in a process of its own."""
    sizes, folder = options.sizes, options.nanogpt
    makes: dict[str, Make] = {"ours": partial(gpts.ours, sizes, options.attention)}
    if folder is not None:
        makes[PEERS[0]] = partial(gpts.nanogpt, sizes, folder, True)
        makes[PEERS[1]] = partial(gpts.nanogpt, sizes, folder, False)
    return makes | {PEERS[2]: partial(gpts.twin, sizes)}


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(commands.parse(PRESETS, description=__doc__))))
