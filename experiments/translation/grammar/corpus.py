"""Sentence pairs from the grammar, and a corpus of them split by a hash."""

from hashlib import sha256
from typing import NamedTuple

import numpy as np

from experiments.translation.grammar.derivation import Sentence
from experiments.translation.grammar.english import english_sentence
from experiments.translation.grammar.german import german_sentence
from experiments.translation.grammar.sentences import sample_sentence
from jaxformer.errors import ConfigError

SHORTEST, LONGEST = 4, 16  # English words; shorter ones repeat, longer ones pad


class Pair(NamedTuple):
    """An English sentence and its German translation."""

    source: str
    target: str


def realize(derivation: Sentence) -> Pair:
    """Return the English and the German sentence of a derivation."""
    return Pair(english_sentence(derivation), german_sentence(derivation))


def sample_pair(rng: np.random.Generator) -> Pair:
    """Return a random pair whose English sentence has 4 to 16 words."""
    while True:
        pair = realize(sample_sentence(rng))
        if SHORTEST <= pair.source.count(" ") + 1 <= LONGEST:
            return pair


def is_held_out(source: str) -> bool:
    """Return whether a sentence is for validation and test only: one in 50, by its hash."""
    return int.from_bytes(sha256(source.encode()).digest()[:8], "big") % 50 == 0


def make_corpus(train: int, validation: int, test: int, seed: int) -> dict[str, list[Pair]]:
    """Return the pairs of "train", "validation" and "test", with no sentence twice.

    Validation and test take the held-out sentences, train all others. The same arguments give the
    same corpus on every machine.

    Raises:
        ConfigError: a size is negative.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    for name, size in sizes.items():
        if size < 0:
            raise ConfigError(f"{name} has {size} pairs; give 0 or more")
    rng = np.random.Generator(np.random.PCG64(seed))
    corpus: dict[str, list[Pair]] = {name: [] for name in sizes}
    seen: set[str] = set()

    def missing(name: str) -> int:
        return sizes[name] - len(corpus[name])

    while any(map(missing, sizes)):
        pair = sample_pair(rng)
        held_out = is_held_out(pair.source)
        part = max("test", "validation", key=missing) if held_out else "train"
        if missing(part) and pair.source not in seen:
            corpus[part].append(pair)
        seen.add(pair.source)
    return corpus
