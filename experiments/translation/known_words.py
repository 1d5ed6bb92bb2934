"""The words of a run's training text, and which words of a line are not among them."""

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path


def words_of(line: str) -> list[str]:
    """The words of a line in lower case, without numbers and punctuation."""
    return _word_pattern().findall(line.lower())


@cache
def _word_pattern() -> re.Pattern[str]:
    """Letters with the marks that belong to them: accents, and vowel signs as in Hindi.

    `re` has no class of marks; U+200C and U+200D join or part the letters of one word.
    """
    marks = "".join(
        character
        for character in map(chr, range(0x300, sys.maxunicode + 1))
        if unicodedata.category(character)[0] == "M"
    )
    letters = rf"[^\W\d_](?:[^\W\d_]|[{marks}\u200c\u200d])*"
    return re.compile(rf"{letters}(?:['’-]{letters})*")


def write_known_words(folder: Path, lines: Iterable[str]) -> None:
    """Writes the words of `lines`, the most frequent first, into a run's data `folder`."""
    parts = Counter(part for line in lines for part in line.split())
    counts: Counter[str] = Counter()
    for part, count in parts.items():  # each once: most of a large text is repeated
        for word in words_of(part):
            counts[word] += count
    words = [word for word, _ in counts.most_common()]
    (folder / "source_words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def read_known_words(folder: Path) -> list[str]:
    """The words of the training text of the run in `folder`; none where none are recorded."""
    path = folder / "data" / "source_words.txt"
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


def unknown_words(known: Iterable[str], line: str) -> list[str]:
    """The words of `line` that are not among the `known` ones; none where nothing is known."""
    known = set(known)
    if not known:
        return []
    return [word for word in dict.fromkeys(words_of(line)) if word not in known]
