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

LINES = 8
"""Lines of a snippet, counting only lines with at least two words."""
TEST_TEXTS = 50
"""Test snippets of each package."""


def snippets(part: Part) -> list[tuple[str, str]]:
    """(package, text) of all snippets of a part: "train", or "test" with `TEST_TEXTS` a package.

    No two of a part overlap, and no test snippet is also a training one. The snippets of a package
    are sorted by a hash of their text. Raises `DataError` where a package has too few.
    """
    training_texts: set[str] = set()
    if part == "test":
        training_texts = {text for _, text in snippets("train")}
    labelled = []
    for package in stdlib.PACKAGES:
        texts = _package_snippets(package, part) - training_texts
        ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
        if len(ordered) < TEST_TEXTS:
            raise DataError(
                f"{stdlib.root() / package}: {len(ordered)} snippets of {LINES} lines for {part}, "
                f"but {TEST_TEXTS} are needed: use a Python with its whole library, or give "
                "--data.train FILE and --data.test FILE"
            )
        chosen = ordered if part == "train" else ordered[:TEST_TEXTS]
        labelled += [(package, text) for text in chosen]
    return labelled


def _package_snippets(package: str, part: Part) -> set[str]:
    """The snippets of all files of `package` that belong to a part."""
    root = stdlib.root()
    texts: set[str] = set()
    for path in stdlib.files(part):
        if stdlib.package_of(path.relative_to(root).as_posix()) == package:
            texts.update(cut_snippets(path.read_text(encoding="utf-8"), package))
    return texts


def cut_snippets(source: str, package: str) -> Iterator[str]:
    """The snippets of one file, each of `LINES` counted lines; a shorter end is left out."""
    import_lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            import_lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: list[str] = []
    counted = 0
    for number, line in enumerate(source.split("\n"), start=1):
        is_code = line.strip() and not line.strip().startswith("#")
        if not is_code or number in import_lines or package in line.lower():
            continue
        lines.append(line.rstrip())
        if len(re.findall(r"[A-Za-z_]\w*", line)) >= 2:
            counted += 1
        if counted == LINES:
            yield textwrap.dedent("\n".join(lines))
            lines = []
            counted = 0
