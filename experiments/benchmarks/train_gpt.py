"""Times a training step of a GPT beside PyTorch's: `python -m experiments.benchmarks.train_gpt`.

The peers are the PyTorch reference model and, with `--nanogpt FOLDER`, nanoGPT's model from a
checkout, eager and compiled. Prints a table and writes RUNS/benchmarks/NAME.json.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.benchmarks import report
from experiments.benchmarks.interleaved_timing import TimingConfig
from experiments.benchmarks.subprocesses import MakeCase
from experiments.benchmarks.train_cases import GPTWork, jax_step, nanogpt_step, torch_step
from experiments.harness import cli
from experiments.language_modelling.presets import shakespeare_char


@dataclass(frozen=True)
class TrainOptions(TimingConfig):
    """What is trained, and how often."""

    name: str = "nanogpt_cpu"
    rounds: int = 20
    repetitions: int = 10
    warm_up: int = 10
    work: GPTWork = GPTWork()
    """The model and the batch."""
    nanogpt: Path | None = None
    """Folder of a checkout of nanoGPT. None: nanoGPT is not measured."""


PRESETS = {
    "nanogpt_cpu": TrainOptions(),
    "characters_10m": TrainOptions(
        name="characters_10m",
        work=GPTWork(model=shakespeare_char.model, batch_size=4, seq_len=256),
        rounds=10,
        repetitions=3,
        warm_up=3,
    ),
}


def main(options: TrainOptions) -> None:
    """Measures, prints the table and writes the file."""
    columns = report.TIMES | report.PEERS
    report.run_tables(options, {"a training step": cases(options)}, columns, PEERS)
    if options.nanogpt is None:
        print("not measured: nanoGPT: give the folder of a checkout of nanoGPT, --nanogpt FOLDER")


PEERS = ("nanoGPT, torch.compile", "nanoGPT, eager", "PyTorch reference, eager")


def cases(options: TrainOptions) -> dict[str, MakeCase]:
    """Returns what makes each case."""
    work, folder = options.work, options.nanogpt
    makes: dict[str, MakeCase] = {"jaxformer": partial(jax_step, work)}
    if folder is not None:
        makes[PEERS[0]] = partial(nanogpt_step, work, folder, True)
        makes[PEERS[1]] = partial(nanogpt_step, work, folder, False)
    return makes | {PEERS[2]: partial(torch_step, work)}


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
