"""BPE-dropout (Provilkov et al. 2020): segmentations of a text that leave out merges at random.

The `tokenizers` library has this too, but its random numbers cannot be seeded. Here the merges of
its vocabulary are applied in Python, with a seed.
"""

import json
import random
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise

from jaxformer.errors import ConfigError
from jaxformer.text.tokenizers.tokenizer import Tokenizer

_SAMPLES_BITS = 6
_KEPT_WORDS = 1 << 20


def sample_encodings(
    lines: Iterable[str], tokenizer: Tokenizer, rate: float, *, seed: int
) -> Iterator[list[int]]:
    """The ids of every line, each possible merge left out with probability `rate`.

    The same arguments give the same ids. A word has one of 64 segmentations, which are drawn from
    the word alone, so that each is computed once. With a rate of 0 the ids are those of
    `tokenizer.encode_batch`. Raises `ConfigError` for a tokenizer other than a byte-level BPE, and
    for a rate outside 0 to 1.

    >>> from jaxformer.text.tokenizers import sample_encodings, train_bpe
    >>> tokenizer = train_bpe(["a tower"] * 3, 267)
    >>> tokenizer.encode("tower")
    [265]
    >>> (ids,) = sample_encodings(["tower"], tokenizer, 0.5, seed=1)
    >>> [tokenizer.token(i) for i in ids], tokenizer.decode(ids)
    (['Ġ', 't', 'ow', 'er'], 'tower')
    """
    if not 0.0 <= rate <= 1.0:
        raise ConfigError(f"bpe_dropout={rate}, but it must be in [0, 1]")
    library = tokenizer.library_tokenizer
    model = _byte_level_model(tokenizer)
    vocabulary: dict[str, int] = model["vocab"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    draws = random.Random(seed)

    @lru_cache(_KEPT_WORDS)
    def ids_of(word: str, sample: int) -> list[int]:
        pieces = _segment(word, ranks, rate, random.Random(f"{sample} {word}"))
        return [vocabulary[piece] for piece in pieces]

    for line in lines:
        text = library.normalizer.normalize_str(line) if library.normalizer else line
        words = [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)]
        yield [i for word in words for i in ids_of(word, draws.getrandbits(_SAMPLES_BITS))]


def _byte_level_model(tokenizer: Tokenizer) -> dict:
    """The vocabulary and merges of a byte-level BPE without options that change its merges."""
    content = json.loads(tokenizer.library_tokenizer.to_str())
    model, pieces = content["model"], content["pre_tokenizer"] or {}
    options = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    odd = any(model.get(name) for name in (*options, "ignore_merges"))
    if model["type"] != "BPE" or pieces.get("type") != "ByteLevel" or odd:
        raise ConfigError(
            f"bpe_dropout needs a byte-level BPE, but the tokenizer is a {model['type']} of "
            "another kind: give --data.tokenizer bpe, or leave bpe_dropout out"
        )
    return model


def _segment(
    word: str, ranks: dict[tuple[str, ...], int], rate: float, draws: random.Random
) -> list[str]:
    """The pieces of `word` by algorithm 1 of the paper; the first of equal merges comes first."""
    pieces = list(word)
    while True:
        merges = [
            (ranks[pair], index)
            for index, pair in enumerate(pairwise(pieces))
            if pair in ranks and draws.random() >= rate
        ]
        if not merges:
            return pieces
        index = min(merges)[1]
        pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
