"""Labelled texts of WikiText-2's validation and test parts, on which no run of it is trained.

`passages`: which article is a passage from? Words of the article's title are removed, because they
would give the answer away. `word_order`: are two words of a sentence swapped?
"""

import re
from collections.abc import Iterator

import numpy as np

from experiments.harness.runs import datasets
from experiments.language_modelling.stdlib_classification import Labelled, Part
from jaxformer.text.data import read_lines

ARTICLES = 10
"""The articles with the most passages are the labels."""

WORDS = 30
"""Words of a passage."""

TEST_PASSAGES = 50
"""The last passages of each article, to test with."""

SENTENCES = 1_800
"""Sentences to learn word order from, and as many to test with."""

_TITLE = re.compile(r" = ([^=].*[^=]) = ")


def passages(part: Part) -> Labelled:
    """The last `TEST_PASSAGES` passages of each article, or those of the paragraphs before."""
    labels: list[str] = []
    texts: list[str] = []
    for title, numbered in _largest():
        first = numbered[-TEST_PASSAGES][0]
        if part == "test":
            chosen = [text for _, text in numbered[-TEST_PASSAGES:]]
        else:
            chosen = [text for paragraph, text in numbered if paragraph < first]
        labels += [title] * len(chosen)
        texts += chosen
    return Labelled(labels, texts)


def word_order(part: Part) -> Labelled:
    """Sentences, of which every second has two neighbouring words swapped (Conneau et al. 2018).

    Those to test with are of the test part, the others of the validation part.
    """
    rng = np.random.default_rng(0)
    found = list(dict.fromkeys(_sentences("test" if part == "test" else "valid")))
    labels: list[str] = []
    texts: list[str] = []
    for number, index in enumerate(rng.permutation(len(found))[:SENTENCES]):
        words = found[index].split()
        if number % 2:
            place = rng.choice(_swappable(words))
            words[place : place + 2] = words[place + 1], words[place]
        labels.append("swapped" if number % 2 else "original")
        texts.append(" " + " ".join(words) + " .")
    return Labelled(labels, texts)


def _sentences(name: str) -> Iterator[str]:
    """Each sentence of 10 to 30 known words in which two can be swapped."""
    for _, paragraphs in _articles(name):
        for paragraph in paragraphs:
            for sentence in paragraph.strip().removesuffix(" .").split(" . "):
                words = sentence.split()
                if 10 <= len(words) <= 30 and "<unk>" not in words and _swappable(words):
                    yield sentence


def _swappable(words: list[str]) -> list[int]:
    """The places of words that differ from the next, both of letters alone."""
    pairs = enumerate(zip(words, words[1:], strict=False))
    return [i for i, (a, b) in pairs if a != b and a.isalpha() and b.isalpha()]


def _largest() -> list[tuple[str, list[tuple[int, str]]]]:
    """Titles and passages, each with the number of its paragraph, of the longest articles.

    Articles with an unknown word in their title are left out: two of them may have one name.
    """
    found = {
        title: [
            (number, text)
            for number, paragraph in enumerate(paragraphs)
            for text in cut(paragraph, title)
        ]
        for name in ("valid", "test")
        for title, paragraphs in _articles(name)
        if "<unk>" not in title
    }
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))[:ARTICLES]


def cut(paragraph: str, title: str) -> Iterator[str]:
    """The passages of `WORDS` words of a paragraph; a shorter rest is left out."""
    known = set(title.lower().split())
    words = [word for word in paragraph.split() if word.lower() not in known]
    for start in range(0, len(words) - WORDS + 1, WORDS):
        yield " " + " ".join(words[start : start + WORDS])


def _articles(name: str) -> Iterator[tuple[str, list[str]]]:
    """Title and paragraphs of each article of a part; headings of sections are left out."""
    title = ""
    paragraphs: list[str] = []
    for line in read_lines(datasets.find("wikitext-2", f"{name}.txt.gz")):
        heading = _TITLE.fullmatch(line)
        if heading:
            if paragraphs:
                yield title, paragraphs
            title, paragraphs = heading[1], []
        elif line.strip() and not line.startswith(" = "):
            paragraphs.append(line)
    yield title, paragraphs
