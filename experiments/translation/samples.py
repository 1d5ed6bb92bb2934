"""Translations of a run that people read: chosen ones, and files of all."""

from pathlib import Path

from experiments.harness.runs import distributed
from experiments.harness.runs.sample_tables import read_table, write_table
from experiments.harness.training.samples import Sample
from experiments.translation.corpus import Text


def chosen_samples(text: Text, hypotheses: list[str]) -> list[Sample]:
    """Three sentences with their translations: a short, a middle and a long one, always the same.

    Fewer where `text` has fewer.
    """
    by_length = sorted(range(len(text.source)), key=lambda i: len(text.source[i]))
    chosen = dict.fromkeys(by_length[len(by_length) * k // 4] for k in (1, 2, 3) if by_length)
    return [Sample(text.source[i], hypotheses[i], text.target[i]) for i in chosen]


def write_samples(folder: Path, name: str, text: Text, hypotheses: list[str]) -> None:
    """Writes samples/NAME.tsv in the run's `folder`; of several processes the first one does."""
    if not distributed.is_first():
        return
    columns = {"source": text.source, "model": hypotheses, "reference": text.target}
    write_table(folder / "samples" / f"{name}.tsv", columns)


def read_samples(folder: Path) -> dict[str, list[str]]:
    """Source, model and reference of the text that the run was scored on; {} where it was not."""
    for name in ("test", "validation"):
        path = folder / "samples" / f"{name}.tsv"
        if path.is_file():
            return read_table(path)
    return {}
