"""Compares the vectors of one word in two texts.

    python -m experiments.examples.embeddings.word_senses --model FOLDER

The learned embedding is the same in both texts, the contextual one is not. FOLDER holds a model of
`transformers` with its tokenizer, such as DistilBERT.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.harness import cli
from experiments.language_modelling.embed import cosine
from jaxformer.errors import ConfigError, DataError
from jaxformer.pipelines import embed
from jaxformer.pretrained import load_pretrained
from jaxformer.text.tokenizers import Tokenizer

_SHOWN = 5


class WordVectors(NamedTuple):
    """The vectors [D] of one word: `learned`, and `contextual` in each text."""

    learned: np.ndarray
    contextual: list[np.ndarray]


@dataclass(frozen=True)
class WordSensesOptions:
    """The model, the word and the texts."""

    model: str = ""
    """Folder of the model, in the format of `transformers`, with its tokenizer."""
    word: str = "bank"
    """The word; it must be one token of the model's vocabulary."""
    texts: tuple[str, ...] = (
        "Write a poem about a man fishing on a river bank.",
        "Write a poem about a man withdrawing money from a bank.",
    )
    """Two or more texts that contain the word."""

    def __post_init__(self):
        if len(self.texts) < 2:
            raise ConfigError(f"{len(self.texts)} texts were given: give 2 or more to compare")


def word_vectors(
    model: Any, params: Any, tokenizer: Tokenizer, word: str, texts: Sequence[str]
) -> WordVectors:
    """Returns the vectors of `word` at its first place in each of `texts`.

    Raises `DataError` for a word of several tokens, and for a text without the word.
    """
    pieces = tokenizer.encode(word)
    if len(pieces) != 1:
        raise DataError(
            f"{word!r} is {len(pieces)} tokens to this vocabulary: choose a word that is one"
        )
    token, contextual = tokenizer.token(pieces[0]), []
    for number, one in enumerate(embed(model, params, texts, tokenizer), start=1):
        if token not in one.tokens:
            raise DataError(
                f"text {number} has no token {token!r}, only {' '.join(one.tokens)}: give one "
                "with the word in it"
            )
        place = one.tokens.index(token)
        contextual.append(one.contextual[place])
    return WordVectors(one.learned[place], contextual)


def report(word: str, found: WordVectors) -> list[str]:
    """Returns lines with the first numbers of each vector, and all cosine similarities."""
    names = ["learned", *(f"in text {i}" for i in range(1, len(found.contextual) + 1))]
    vectors = [found.learned, *found.contextual]
    lines = [f"{word!r}: {len(found.learned)} numbers, cosines with {', '.join(names)}"]
    for name, vector in zip(names, vectors, strict=True):
        numbers = " ".join(f"{value:6.2f}" for value in vector[:_SHOWN])
        cosines = " ".join(f"{cosine(vector, other):6.3f}" for other in vectors)
        lines.append(f"{name:10} {numbers} ... | {cosines}")
    return lines


def main(options: WordSensesOptions) -> None:
    """Prints the vectors and their cosine similarities."""
    if not options.model:
        raise ConfigError("no model was given: give --model FOLDER, such as that of a DistilBERT")
    model, params, tokenizer, _ = load_pretrained(options.model)
    if tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer: give a folder with one")
    for number, text in enumerate(options.texts, start=1):
        print(f"text {number}: {text}")
    found = word_vectors(model, params, tokenizer, options.word, options.texts)
    print("\n".join(report(options.word, found)))


if __name__ == "__main__":
    cli.start(main, {"default": WordSensesOptions()}, __doc__)
