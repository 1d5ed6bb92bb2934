"""Text to vectors: `python -m experiments.language_modelling.embed --run RUN --text TEXT TEXT`.

Prints how near the vectors of a token are where it stands in several places, and how near the
texts are. `--output` keeps all vectors in a NumPy file.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from experiments import commands
from experiments.language_modelling.reading import texts_of
from experiments.language_modelling.trained import load_trained
from jaxformer import generation
from jaxformer.generation import Embedded


@dataclass(frozen=True)
class EmbedOptions:
    """With which run, what (texts, or a file of one a line, "-" for standard input), and where to.

    The file `output` (.npz) holds of text i, from 0, `tokens_i` [T], `learned_i` [T, D] (the
    embedding's rows) and `contextual_i` [T, D], and of all texts `pooled` [texts, D].
    """

    run: str = "runs/language_modelling/bert_tiny"
    text: tuple[str, ...] = ()
    input: str = ""
    output: str = ""


def main(options: EmbedOptions) -> None:
    """Prints the comparisons and writes the vectors."""
    trained = load_trained(Path(options.run))
    texts = texts_of(options.text, options.input)
    found = generation.embed(trained.model, trained.params, texts, trained.tokenizer)
    for number, (text, one) in enumerate(zip(texts, found, strict=True), start=1):
        print(f"text {number}: {text} ({len(one.tokens)} tokens)")
    print("\n".join([*compare_tokens(found), *compare_texts(found)]))
    if options.output:
        write(Path(options.output), found)


def compare_tokens(found: Sequence[Embedded]) -> list[str]:
    """A line for every two places of one token: cosines of its learned and contextual vectors."""
    places = defaultdict(list)
    for text, one in enumerate(found):
        for index, token in enumerate(one.tokens):
            places[token].append((text, index))
    lines = []
    for token, where in places.items():
        for (a, i), (b, j) in combinations(where, 2):
            learned = cosine(found[a].learned[i], found[b].learned[j])
            contextual = cosine(found[a].contextual[i], found[b].contextual[j])
            lines.append(
                f"{token!r} in text {a + 1} (token {i + 1}) and text {b + 1} (token {j + 1}): "
                f"learned {learned:.3f}, contextual {contextual:.3f}"
            )
    return lines


def compare_texts(found: Sequence[Embedded]) -> list[str]:
    """A line for every two texts: the cosine of their pooled vectors."""
    return [
        f"text {a + 1} and text {b + 1}: pooled {cosine(found[a].pooled, found[b].pooled):.3f}"
        for a, b in combinations(range(len(found)), 2)
    ]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The cosine of the angle between two vectors."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def write(path: Path, found: Sequence[Embedded]) -> None:
    """Writes all vectors to `path`, in NumPy's format and without pickles."""
    arrays = {"pooled": np.stack([one.pooled for one in found])}
    for i, one in enumerate(found):
        arrays |= {f"tokens_{i}": np.array(one.tokens), f"learned_{i}": one.learned}
        arrays[f"contextual_{i}"] = one.contextual
    with path.open("wb") as file:
        np.savez(file, **arrays)


if __name__ == "__main__":
    options = {"default": EmbedOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
