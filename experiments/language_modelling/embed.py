"""Text to vectors: `python -m experiments.language_modelling.embed --run RUN --text TEXT TEXT`.

Prints how similar the vectors of a token are in its different places, and how similar the texts
are. `--output` keeps all vectors in a NumPy file.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import cli
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.text_io import read_texts
from experiments.language_modelling.evaluation import token_text
from experiments.language_modelling.load_run import load_run
from jaxformer import pipelines
from jaxformer.pipelines import TextEmbeddings
from jaxformer.text.tokenizers import Tokenizer


@dataclass(frozen=True)
class EmbedOptions(RunOptions):
    """The run, the texts, and where the vectors go."""

    run: str = "runs/language_modelling/bert_tiny"
    """The folder of a run, or of pretrained weights."""
    text: tuple[str, ...] = ()
    """The texts."""
    input: str = ""
    """A file of one text a line; "-" is standard input."""
    output: str = ""
    """A file (.npz) for the vectors (see `write`); empty: none."""


def main(options: EmbedOptions) -> None:
    """Prints the comparisons and writes the vectors."""
    loaded = load_run(Path(options.run), options)
    texts = read_texts(options.text, options.input)
    found = pipelines.embed(loaded.model, loaded.params, texts, loaded.tokenizer)
    for number, (text, one) in enumerate(zip(texts, found, strict=True), start=1):
        print(f"text {number}: {text} ({len(one.tokens)} tokens)")
    print("\n".join([*compare_tokens(found, loaded.tokenizer), *compare_texts(found)]))
    if options.output:
        write(Path(options.output), found)


def compare_tokens(found: Sequence[TextEmbeddings], tokenizer: Tokenizer) -> list[str]:
    """A line for each two places of one token: cosines of its learned and contextual vectors."""
    places = defaultdict(list)
    for text, one in enumerate(found):
        for index, token in enumerate(one.tokens):
            places[token].append((text, index))
    lines = []
    for token, where in places.items():
        said = repr(token_text(token, tokenizer))
        for (a, i), (b, j) in combinations(where, 2):
            learned = cosine(found[a].learned[i], found[b].learned[j])
            contextual = cosine(found[a].contextual[i], found[b].contextual[j])
            lines.append(
                f"{said} in text {a + 1} (token {i + 1}) and text {b + 1} (token {j + 1}): "
                f"learned {learned:.3f}, contextual {contextual:.3f}"
            )
    return lines


def compare_texts(found: Sequence[TextEmbeddings]) -> list[str]:
    """A line for every two texts: the cosine of their mean vectors."""
    return [
        f"text {a + 1} and text {b + 1}: mean {cosine(found[a].mean, found[b].mean):.3f}"
        for a, b in combinations(range(len(found)), 2)
    ]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of the angle between two vectors."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def write(path: Path, found: Sequence[TextEmbeddings]) -> None:
    """Writes all vectors to `path`, in NumPy's format and without pickles.

    Of text i, from 0: `tokens_i` [T], `learned_i` [T, D] (rows of the embedding) and
    `contextual_i` [T, D]; of all texts `pooled` [texts, D].
    """
    arrays: dict[str, Any] = {"mean": np.stack([one.mean for one in found])}
    for i, one in enumerate(found):
        arrays |= {f"tokens_{i}": np.array(one.tokens), f"learned_{i}": one.learned}
        arrays[f"contextual_{i}"] = one.contextual
    with path.open("wb") as file:
        np.savez(file, **arrays)


if __name__ == "__main__":
    cli.start(main, {"default": EmbedOptions()}, __doc__)
