"""Times training of a translator: `python -m experiments.benchmarks.train_translation`.

The model of the preset `multi30k_tiny` on random words. The peers are the PyTorch reference model
and `torch.nn.Transformer`. Prints a table and writes RUNS/benchmarks/NAME.json.
"""

import sys
from dataclasses import dataclass, field
from functools import partial

from experiments.benchmarks import report, seq2seq_subjects
from experiments.benchmarks.environment import environment
from experiments.benchmarks.gpt_subjects import AttentionName
from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.seq2seq_subjects import Sizes
from experiments.benchmarks.subprocesses import Make, compare
from experiments.harness import cli


@dataclass(frozen=True)
class TranslationOptions(TimingConfig):
    """What is trained, and how often."""

    name: str = "train_translation"
    rounds: int = 10
    repetitions: int = 3
    warm_up: int = 3
    sizes: Sizes = field(default_factory=Sizes)
    """The model and the batch."""
    attention_fn: AttentionName = "reference"
    """The attention function of our model."""


PEERS = ("PyTorch reference, eager", "torch.nn.Transformer, eager")


def main(options: TranslationOptions) -> None:
    """Measures, prints the table and writes the file."""
    where, sizes = environment(), options.sizes
    found = compare(subjects(options), options, peers=PEERS)
    title = f"a step of {sizes.rows} x {sizes.length} target tokens"
    columns = report.TIMES | {"target tokens a second": report.per_second(sizes.tokens)}
    report.publish(options, where, {title: found}, columns)


def subjects(options: TranslationOptions) -> dict[str, Make]:
    """Returns what makes each subject."""
    sizes = options.sizes
    return {
        "ours": partial(seq2seq_subjects.ours, sizes, options.attention_fn),
        PEERS[0]: partial(seq2seq_subjects.torch_reference, sizes),
        PEERS[1]: partial(seq2seq_subjects.torch_nn, sizes),
    }


if __name__ == "__main__":
    options = {"default": TranslationOptions()}
    sys.exit(cli.run(lambda: main(cli.parse(options, description=__doc__))))
