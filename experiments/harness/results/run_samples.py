"""The texts that a run has read and written."""

from collections.abc import Sequence
from pathlib import Path

from experiments.harness.cli import display
from experiments.harness.runs.sample_tables import read_table
from jaxformer.records import Record


def sample_table(folder: Path) -> dict[str, list[str]]:
    """The samples of the text that the run in `folder` was scored on; {} where it has none."""
    return table_of_part(folder, Record(folder / "scores.json").read_if_intact().get("text", ""))


def sample_texts(folder: Path) -> dict[str, list[str]]:
    """The texts that the run in `folder` has read and written, as columns of equal length.

    They are source, model and reference of translations, or prompt and model; {} where it has none.
    """
    path, table = folder / "samples" / "prompts.txt", sample_table(folder)
    if not path.is_file():
        return table if "model" in table else {}
    texts = path.read_text(encoding="utf-8").split(f"\n{display.RULE}\n")
    return prompted(texts, Record(folder / "config.json").read_if_intact().get("prompts", []))


def prompted(texts: Sequence[str], prompts: Sequence[str]) -> dict[str, list[str]]:
    """The columns prompt and model of `texts`, each of which begins with one of `prompts`."""
    begun = [max((x for x in prompts if text.startswith(x)), key=len, default="") for text in texts]
    written = [text[len(prompt) :] for text, prompt in zip(texts, begun, strict=True)]
    return {"prompt": begun, "model": written}


def table_of_part(folder: Path, text: str) -> dict[str, list[str]]:
    """The columns of the samples of the part `text`; {} where there are none."""
    for name in (text, f"{text}-losses"):
        path = folder / "samples" / f"{name}.tsv"
        if path.is_file():
            return read_table(path)
    return {}
