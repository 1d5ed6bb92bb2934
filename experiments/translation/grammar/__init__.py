"""A synchronous grammar: one derivation yields an English sentence and its German translation."""

from hashlib import sha256
from typing import NamedTuple

import numpy as np

from experiments.translation.grammar.derivation import Sentence
from experiments.translation.grammar.english import english_sentence
from experiments.translation.grammar.german import german_sentence
from experiments.translation.grammar.sampling import sample_sentence

SHORTEST, LONGEST = 4, 16  # English words; shorter ones repeat, longer ones pad


class Pair(NamedTuple):
    """An English sentence and its German translation."""

    source: str
    target: str


def realize(derivation: Sentence) -> Pair:
    """The English and the German sentence of a derivation."""
    return Pair(english_sentence(derivation), german_sentence(derivation))


def sample_pair(rng: np.random.Generator) -> Pair:
    """A random pair whose English sentence has 4 to 16 words."""
    while True:
        pair = realize(sample_sentence(rng))
        if SHORTEST <= pair.source.count(" ") + 1 <= LONGEST:
            return pair


def is_held_out(source: str) -> bool:
    """Whether a sentence is for validation and test only: one in 50, by its hash."""
    return int.from_bytes(sha256(source.encode()).digest()[:8], "big") % 50 == 0


def make_corpus(train: int, validation: int, test: int, seed: int) -> dict[str, list[Pair]]:
    """The pairs of "train", "validation" and "test", with no sentence twice.

    Validation and test take the held-out sentences, train all others. The same arguments give the
    same corpus on every machine.
    """
    sizes = {"train": train, "validation": validation, "test": test}
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
