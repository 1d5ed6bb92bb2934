"""Examples that need no files of the user: from Python's standard library and from WikiText-2.

- Which of ten packages is a snippet from? Imports, comments and lines with the package's name are
  removed, because they would give the answer away.
- Which article of WikiText-2 is a passage from? Words of its title are removed.
- Are two neighbouring words of a sentence of WikiText-2 swapped (Conneau et al. 2018)?

No run is trained on these test files of the library, or on WikiText-2's validation and test parts.
"""

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from experiments.harness.runs import datasets
from experiments.language_modelling import stdlib
from jaxformer.errors import DataError
from jaxformer.text.data import read_lines

Part = Literal["train", "test"]

LINES = 8  # of a snippet, counting only those with at least two words
TEST_TEXTS = 50  # test snippets of each package, and test passages of each article
ARTICLES = 10  # those with the most passages are the labels
WORDS = 30  # of a passage
SENTENCES = 1_800  # to learn word order from, and as many to test with

_TITLE = re.compile(r" = ([^=].*[^=]) = ")


class Labelled(NamedTuple):
    """Texts, or pairs of texts, with labels: `texts[i]` has the label `labels[i]`."""

    labels: list[str]
    texts: list[str]
    seconds: list[str] | None = None


def snippets(part: Part) -> Labelled:
    """All snippets of the train files, or `TEST_TEXTS` of each package of the test files.

    No two of a part overlap, and no test snippet is also a training one. They are sorted by a hash
    of their text. Raises `DataError` where a package has too few.
    """
    trained = set() if part == "train" else set(snippets("train").texts)
    root, labels, texts = stdlib.root(), [], []
    files = [
        (stdlib.package_of(path.relative_to(root).as_posix()), path) for path in stdlib.files(part)
    ]
    for package in stdlib.PACKAGES:
        sources = (path.read_text(encoding="utf-8") for name, path in files if name == package)
        cut = {text for source in sources for text in cut_snippets(source, package)} - trained
        ordered = sorted(cut, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
        if len(ordered) < TEST_TEXTS:
            raise DataError(
                f"{root / package}: {len(ordered)} snippets of {LINES} lines for {part}, but "
                f"{TEST_TEXTS} are needed: use a Python with its whole library, or give "
                "--train FILE and --test FILE"
            )
        chosen = ordered if part == "train" else ordered[:TEST_TEXTS]
        labels += [package] * len(chosen)
        texts += chosen
    return Labelled(labels, texts)


def cut_snippets(source: str, package: str) -> Iterator[str]:
    """The snippets of one file, each of `LINES` counted lines; a shorter rest is left out."""
    imports = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: list[str] = []
    counted = 0
    for number, line in enumerate(source.split("\n"), start=1):
        is_comment = not line.strip() or line.strip().startswith("#")
        if number in imports or is_comment or package in line.lower():
            continue
        lines.append(line.rstrip())
        counted += len(re.findall(r"[A-Za-z_]\w*", line)) >= 2
        if counted == LINES:
            yield textwrap.dedent("\n".join(lines))
            lines, counted = [], 0


def passages(part: Part) -> Labelled:
    """The last `TEST_TEXTS` passages of each of the longest articles, or those of the paragraphs
    before.

    Articles with an unknown word in their title are left out: two of them may have one name.
    """
    cut = {
        title: [
            (number, text)
            for number, paragraph in enumerate(paragraphs)
            for text in cut_passages(paragraph, title)
        ]
        for name in ("valid", "test")
        for title, paragraphs in _articles(name)
        if "<unk>" not in title
    }
    labels: list[str] = []
    texts: list[str] = []
    longest = sorted(cut.items(), key=lambda item: (-len(item[1]), item[0]))[:ARTICLES]
    for title, numbered in longest:
        test = numbered[-TEST_TEXTS:]
        chosen = test if part == "test" else [x for x in numbered if x[0] < test[0][0]]
        labels += [title] * len(chosen)
        texts += [text for _, text in chosen]
    return Labelled(labels, texts)


def cut_passages(paragraph: str, title: str) -> Iterator[str]:
    """The passages of `WORDS` words of a paragraph; a shorter rest is left out."""
    left_out = set(title.lower().split())
    words = [word for word in paragraph.split() if word.lower() not in left_out]
    for start in range(0, len(words) - WORDS + 1, WORDS):
        yield " " + " ".join(words[start : start + WORDS])


def word_order(part: Part) -> Labelled:
    """Sentences, of which every second has two neighbouring words swapped.

    Those to test with are of WikiText-2's test part, the others of its validation part.
    """
    rng = np.random.default_rng(0)
    sentences = list(dict.fromkeys(_sentences("test" if part == "test" else "valid")))
    labels: list[str] = []
    texts: list[str] = []
    for number, index in enumerate(rng.permutation(len(sentences))[:SENTENCES]):
        words = sentences[index].split()
        if number % 2:
            i = rng.choice(_swappable(words))
            words[i : i + 2] = words[i + 1], words[i]
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
    """The indices of words that differ from the next, both of letters alone."""
    pairs = enumerate(zip(words, words[1:], strict=False))
    return [i for i, (a, b) in pairs if a != b and a.isalpha() and b.isalpha()]


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


LABELLED = {"python_stdlib": snippets, "articles": passages, "word_order": word_order}
"""Labelled texts by name."""
