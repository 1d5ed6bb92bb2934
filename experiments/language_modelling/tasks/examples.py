"""Examples that need no files of the user: snippets of ten packages of the standard library.

The label is the package. Imports, comments and lines with its name are removed, because they would
give the answer away. No run is trained on the test files.
"""

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterator
from typing import Literal

from experiments.language_modelling import stdlib
from jaxformer.errors import DataError

Part = Literal["train", "test"]

LINES = 8  # of a snippet, counting only those with at least two words
TEST_TEXTS = 50  # of each package


def snippets(part: Part) -> list[tuple[str, str]]:
    """(package, text) of all snippets of the train files, or `TEST_TEXTS` a package of the test's.

    No two of a part overlap, and no test snippet is also a training one. They are sorted by a hash
    of their text. Raises `DataError` where a package has too few.
    """
    trained = {text for _, text in snippets("train")} if part == "test" else set()
    root, labelled = stdlib.root(), []
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
                "--data.train FILE and --data.test FILE"
            )
        chosen = ordered if part == "train" else ordered[:TEST_TEXTS]
        labelled += [(package, text) for text in chosen]
    return labelled


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
