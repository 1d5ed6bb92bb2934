"""The words of a run's training text: what its model can know, and which words it has never met."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_MOST = 100_000
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


def write(folder: Path, lines: Iterable[str]) -> None:
    """Keeps the words of `lines`, the most frequent first, in `folder`, a run's data."""
    counts = Counter(word for line in lines for word in words_of(line))
    words = [word for word, _ in counts.most_common(_MOST)]
    (folder / "source_words.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def load(folder: Path) -> list[str]:
    """The words that `write` kept; none for a folder without them."""
    path = folder / "data" / "source_words.txt"
    return path.read_text(encoding="utf-8").split() if path.is_file() else []


def unknown(known: Iterable[str], line: str) -> list[str]:
    """The words of `line` that are not among the `known` ones."""
    known = set(known)
    return [word for word in dict.fromkeys(words_of(line)) if known and word not in known]


def words_of(line: str) -> list[str]:
    """The words of a line in lower case, without numbers and punctuation."""
    return _WORD.findall(line.lower())
