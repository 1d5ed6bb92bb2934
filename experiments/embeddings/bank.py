"""One word in two sentences: `python -m experiments.embeddings.bank --model FOLDER`.

Its learned embedding is the same in both, its contextual one is not. FOLDER holds a model as
`transformers` writes it, such as a DistilBERT.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flax import linen as nn

from experiments import commands
from experiments.language_modelling.embed import cosine
from jaxformer.config import ConfigError
from jaxformer.data import DataError
from jaxformer.generation import embed
from jaxformer.pretrained import load_pretrained
from jaxformer.tokenizers import Tokenizer

_SHOWN = 5


class Meaning(NamedTuple):
    """The vectors [D] of one word: `learned`, and `contextual` in each text."""

    learned: np.ndarray
    contextual: list[np.ndarray]


@dataclass(frozen=True)
class BankOptions:
    """The folder of the model, the word, and two or more texts that it stands in."""

    model: str = ""
    word: str = "bank"
    texts: tuple[str, ...] = (
        "Write a poem about a man fishing on a river bank.",
        "Write a poem about a man withdrawing money from a bank.",
    )

    def __post_init__(self):
        if len(self.texts) < 2:
            raise ConfigError(f"{len(self.texts)} texts were given, but it takes 2 to compare")


def meaning(
    model: nn.Module, params: Any, tokenizer: Tokenizer, word: str, texts: Sequence[str]
) -> Meaning:
    """The vectors of `word`, which is one token, where it first stands in each of `texts`.

    Raises `DataError` for a word of several tokens, and for a text without it.
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
    return Meaning(one.learned[place], contextual)


def report(word: str, found: Meaning) -> list[str]:
    """The first numbers of each vector, and the cosines between all of them."""
    names = ["learned", *(f"in text {i}" for i in range(1, len(found.contextual) + 1))]
    vectors = [found.learned, *found.contextual]
    lines = [f"{word!r}: {len(found.learned)} numbers, cosines with {', '.join(names)}"]
    for name, vector in zip(names, vectors, strict=True):
        numbers = " ".join(f"{value:6.2f}" for value in vector[:_SHOWN])
        cosines = " ".join(f"{cosine(vector, other):6.3f}" for other in vectors)
        lines.append(f"{name:10} {numbers} ... | {cosines}")
    return lines


def main(options: BankOptions) -> None:
    """Prints the vectors and how near they are."""
    if not options.model:
        raise ConfigError("no model was given: give --model FOLDER, such as that of a DistilBERT")
    model, params, tokenizer = load_pretrained(options.model)
    if tokenizer is None:
        raise ConfigError(f"{options.model} has no tokenizer: give a folder with one")
    for number, text in enumerate(options.texts, start=1):
        print(f"text {number}: {text}")
    found = meaning(model, params, tokenizer, options.word, options.texts)
    print("\n".join(report(options.word, found)))


if __name__ == "__main__":
    options = {"default": BankOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
