"""Sentence pairs from the grammar, and a corpus of them split by a hash."""

from hashlib import sha256
from typing import NamedTuple

import numpy as np

from experiments.translation.grammar.english import english_sentence
from experiments.translation.grammar.german import german_sentence
from experiments.translation.grammar.rules import sentence
from experiments.translation.grammar.trees import Sentence
from jaxformer.config import ConfigError

SHORTEST, LONGEST = 4, 16  # English words; shorter ones repeat, longer ones pad
HELD_OUT_ONE_IN = 50


class Pair(NamedTuple):
    """An English sentence and its German translation."""

    source: str
    target: str


def realize(derivation: Sentence) -> Pair:
    """Return the two sentences of one derivation."""
    return Pair(english_sentence(derivation), german_sentence(derivation))


def sample_pair(rng: np.random.Generator) -> Pair:
    """Return a random English sentence of 4 to 16 words with its German translation."""
    while True:
        derivation = sentence(rng)
        source = english_sentence(derivation)
        if SHORTEST <= source.count(" ") + 1 <= LONGEST:
            return Pair(source, german_sentence(derivation))


def is_held_out(source: str) -> bool:
    """Return whether a sentence may only be validated or tested on: one in 50, by its hash."""
    digest = sha256(source.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def make_corpus(train: int, validation: int, test: int, seed: int) -> dict[str, list[Pair]]:
    """Return "train", "validation" and "test", lists of the given sizes, all sources distinct.

    Held-out sentences fill validation and test by turns, all others train. The same arguments
    give the same corpus on every machine.

    Raises:
        ConfigError: a size is negative.
    """
    sizes = {"train": train, "validation": validation, "test": test}
    for name, size in sizes.items():
        if size < 0:
            raise ConfigError(f"the corpus needs {name} of 0 pairs or more, not {size}: raise it")
    rng = np.random.Generator(np.random.PCG64(seed))
    corpus: dict[str, list[Pair]] = {name: [] for name in sizes}
    seen: set[str] = set()
    while any(len(corpus[name]) < size for name, size in sizes.items()):
        pair = sample_pair(rng)
        if pair.source in seen:
            continue
        seen.add(pair.source)
        name = _part(pair.source, corpus, sizes)
        if len(corpus[name]) < sizes[name]:
            corpus[name].append(pair)
    return corpus


def _part(source: str, corpus: dict[str, list[Pair]], sizes: dict[str, int]) -> str:
    if not is_held_out(source):
        return "train"
    missing = {name: sizes[name] - len(corpus[name]) for name in ("test", "validation")}
    return max(missing, key=lambda name: missing[name])
