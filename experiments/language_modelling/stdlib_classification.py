"""A task to learn from few labels: which package of the standard library is a snippet from?

Import statements, comments and lines with the package's own name are removed, because they would
give the answer away.
"""

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from experiments.language_modelling import stdlib
from jaxformer.errors import DataError

Part = Literal["train", "test"]

LINES = 8
"""Lines of a snippet, counting only those with at least two words."""

TEST_SNIPPETS = 50
"""Test snippets of each package."""


class Labelled(NamedTuple):
    """Texts with labels: `texts[i]` has the label `labels[i]`."""

    labels: list[str]
    texts: list[str]


def snippets(part: Part) -> Labelled:
    """All snippets from the train files, or `TEST_SNIPPETS` of each package from the test files.

    No two of a part overlap, and no test snippet is also a training one. They are sorted by a hash
    of their text. Raises `DataError` where a package has too few.
    """
    known = set() if part == "train" else set(snippets("train").texts)
    labels: list[str] = []
    texts: list[str] = []
    paths = _paths(part)
    for package in stdlib.PACKAGES:
        found = sorted(set(_cut_all(paths[package], package)) - known, key=_order)
        if len(found) < TEST_SNIPPETS:
            raise DataError(
                f"{stdlib.root() / package}: {len(found)} snippets of {LINES} lines for {part}, "
                f"but {TEST_SNIPPETS} are needed: use a Python with its whole library, or give "
                "--train FILE and --test FILE"
            )
        chosen = found if part == "train" else found[:TEST_SNIPPETS]
        labels += [package] * len(chosen)
        texts += chosen
    return Labelled(labels, texts)


def cut(source: str, package: str) -> Iterator[str]:
    """The snippets of one file, each of `LINES` counted lines; a shorter rest is left out."""
    lines: list[str] = []
    counted = 0
    for line in _kept_lines(source, package):
        lines.append(line)
        counted += len(re.findall(r"[A-Za-z_]\w*", line)) >= 2
        if counted == LINES:
            yield textwrap.dedent("\n".join(lines))
            lines, counted = [], 0


def _paths(part: stdlib.Part) -> dict[str, list[Path]]:
    """The files of `part` that each package holds."""
    root = stdlib.root()
    found: dict[str, list[Path]] = {package: [] for package in stdlib.PACKAGES}
    for path in stdlib.files(part):
        package = stdlib.package_of(path.relative_to(root).as_posix())
        if package is not None:
            found[package].append(path)
    return found


def _cut_all(paths: list[Path], package: str) -> Iterator[str]:
    for path in paths:
        yield from cut(path.read_text(encoding="utf-8"), package)


def _kept_lines(source: str, package: str) -> Iterator[str]:
    dropped = {
        number
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    for number, line in enumerate(source.split("\n"), start=1):
        plain = line.strip()
        comment = not plain or plain.startswith("#")
        if number not in dropped and not comment and package not in line.lower():
            yield line.rstrip()


def _order(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
