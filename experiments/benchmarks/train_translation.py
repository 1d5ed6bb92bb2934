"""Times training of a translator: `python -m experiments.benchmarks.train_translation`.

The model of the preset `multi30k_tiny` on random words. The peers are the PyTorch reference model
and `torch.nn.Transformer`. Prints a table and writes RUNS/benchmarks/NAME.json.
"""

from dataclasses import dataclass
from functools import partial

from experiments.benchmarks import report
from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.subprocesses import MakeCase
from experiments.benchmarks.train_cases import TranslationWork, jax_step, torch_step
from experiments.harness import cli


@dataclass(frozen=True)
class TranslationOptions(TimingConfig):
    """What is trained, and how often."""

    name: str = "train_translation"
    rounds: int = 10
    repetitions: int = 3
    warm_up: int = 3
    work: TranslationWork = TranslationWork()
    """The model and the batch."""


PEERS = ("PyTorch reference, eager", "torch.nn.Transformer, eager")


def main(options: TranslationOptions) -> None:
    """Measures, prints the table and writes the file."""
    work = options.work
    title = f"a step of {work.batch_size} x {work.seq_len} target tokens"
    columns = report.TIMES | report.PEERS | report.TOKENS
    report.run_tables(options, {title: cases(work)}, columns, PEERS)


def cases(work: TranslationWork) -> dict[str, MakeCase]:
    """Returns what makes each case."""
    return {
        "jaxformer": partial(jax_step, work),
        PEERS[0]: partial(torch_step, work),
        PEERS[1]: partial(torch_step, work, torch_nn=True),
    }


if __name__ == "__main__":
    cli.start(main, {"default": TranslationOptions()}, __doc__)
