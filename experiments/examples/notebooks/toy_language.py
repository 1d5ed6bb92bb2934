"""A toy language pair for the notebooks: short English sentences and their German translations.

German articles and adjectives change with gender and case, the second verb goes to the end, and
the first verb comes second: "today the man can see a dog" becomes "heute kann der Mann einen Hund
sehen".
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from jaxformer.text.tokenizers import BOS, EOS, PAD, Tokenizer

_NOUNS = {
    "man": ("Mann", "m"),
    "dog": ("Hund", "m"),
    "bird": ("Vogel", "m"),
    "woman": ("Frau", "f"),
    "cat": ("Katze", "f"),
    "mouse": ("Maus", "f"),
    "child": ("Kind", "n"),
    "horse": ("Pferd", "n"),
}
_ADJECTIVES = {"small": "klein", "big": "groß", "young": "jung", "white": "weiß"}
_VERBS = {
    "see": ("sieht", "sehen"),
    "hear": ("hört", "hören"),
    "find": ("findet", "finden"),
    "love": ("liebt", "lieben"),
    "seek": ("sucht", "suchen"),
    "paint": ("malt", "malen"),
}
_MODALS = {"can": "kann", "must": "muss"}
_TIMES = {"today": "heute", "tomorrow": "morgen"}

# Articles, and endings of adjectives after them, by article, case and gender.
_ARTICLES = {
    "the": {"nominative": "der die das", "accusative": "den die das"},
    "a": {"nominative": "ein eine ein", "accusative": "einen eine ein"},
}
_ENDINGS = {
    "the": {"nominative": "e e e", "accusative": "en e e"},
    "a": {"nominative": "er e es", "accusative": "en e es"},
}


def sentence_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """`count` different pairs of an English sentence and its translation."""
    rng = np.random.default_rng(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        english, german = _sentence_pair(rng)
        found[english] = german
    return list(found.items())


def encode_pairs(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer
) -> tuple[Int[np.ndarray, "B S"], Int[np.ndarray, "B T"]]:
    """Sources x1 .. xn <eos> and targets <bos> y1 .. ym <eos> as ids, filled up with <pad>."""
    sources = [[*tokenizer.encode(english), EOS] for english, _ in pairs]
    targets = [[BOS, *tokenizer.encode(german), EOS] for _, german in pairs]
    return _padded(sources), _padded(targets)


def _padded(rows: list[list[int]]) -> np.ndarray:
    length = max(map(len, rows))
    return np.array([row + [PAD] * (length - len(row)) for row in rows], np.int32)


def _sentence_pair(rng: np.random.Generator) -> tuple[str, str]:
    subject, object_ = rng.choice(list(_NOUNS), 2, replace=False)
    subject_pair = _noun_phrase(rng, subject, "nominative")
    object_pair = _noun_phrase(rng, object_, "accusative")
    verb, modal, time = _one(rng, _VERBS), _one(rng, _MODALS, 0.5), _one(rng, _TIMES, 0.5)
    english = [time, subject_pair[0], f"{modal} {verb}" if modal else f"{verb}s", object_pair[0]]
    present, infinitive = _VERBS[verb]
    first = _MODALS[modal] if modal else present
    start = [_TIMES[time], first, subject_pair[1]] if time else [subject_pair[1], first]
    german = [*start, object_pair[1], infinitive if modal else ""]
    return " ".join(filter(None, english)), " ".join(filter(None, german))


def _noun_phrase(rng: np.random.Generator, noun: str, case: str) -> tuple[str, str]:
    """Article, perhaps an adjective, and `noun`, in both languages."""
    article, adjective = _one(rng, _ARTICLES), _one(rng, _ADJECTIVES, 0.5)
    german, gender = _NOUNS[noun]
    column = "mfn".index(gender)
    words = [_ARTICLES[article][case].split()[column]]
    if adjective:
        words.append(_ADJECTIVES[adjective] + _ENDINGS[article][case].split()[column])
    return " ".join(filter(None, [article, adjective, noun])), " ".join([*words, german])


def _one(rng: np.random.Generator, words: dict, chance: float = 1.0) -> str:
    """One of `words`, or "" if a coin with this `chance` says no."""
    return str(rng.choice(list(words))) if rng.random() < chance else ""
