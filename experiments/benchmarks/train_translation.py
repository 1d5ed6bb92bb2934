"""Training a translator beside PyTorch: `python -m experiments.benchmarks.train_translation`.

The model of the preset `multi30k_tiny` on batches of 256 x 16 random words: ours, our PyTorch twin
and `torch.nn.Transformer`, each in a process of its own, in turn. Prints a table and writes
runs/benchmarks.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from experiments import commands
from experiments.benchmarks import report, translation
from experiments.benchmarks.alternate import Summary
from experiments.benchmarks.children import Make, compare
from experiments.benchmarks.environment import environment
from experiments.benchmarks.translation import Sizes
from jaxformer import kernels
from jaxformer.config import ConfigError, check_least


@dataclass(frozen=True)
class TranslationOptions:
    """What is trained, and how long it is looked at: `rounds` of `steps` each, after `warm_up`."""

    name: str = "train_translation"
    sizes: Sizes = field(default_factory=Sizes)
    attention: str = "reference"
    rounds: int = 10
    steps: int = 3
    warm_up: int = 3
    runs: str = "runs"

    def __post_init__(self):
        check_least(self, 1, "rounds", "steps", "warm_up")
        if self.attention not in kernels.KERNELS:
            known = ", ".join(kernels.KERNELS)
            raise ConfigError(f"attention={self.attention!r} is no kernel: choose one of {known}")


PEERS = ("PyTorch twin, eager", "torch.nn.Transformer, eager")


def main(options: TranslationOptions) -> None:
    """Measures, prints the table and writes the file."""
    where, sizes = environment(), options.sizes
    found = compare(
        subjects(options),
        peers=PEERS,
        rounds=options.rounds,
        count=options.steps,
        warm_up=options.warm_up,
    )

    def speed(summary: Summary, facts: Mapping[str, Any]) -> str:
        return f"{sizes.tokens / summary.median:.0f}"

    title = f"a step of {sizes.rows} x {sizes.length} target tokens"
    columns = report.TIMES | {"target tokens a second": speed}
    report.publish(options, where, {title: found}, columns)


def subjects(options: TranslationOptions) -> dict[str, Make]:
    """What makes each of those that are measured, in a process of its own."""
    sizes = options.sizes
    return {
        "ours": partial(translation.ours, sizes, options.attention),
        PEERS[0]: partial(translation.twin, sizes),
        PEERS[1]: partial(translation.torch_nn, sizes),
    }


if __name__ == "__main__":
    options = {"default": TranslationOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
