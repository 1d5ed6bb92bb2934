"""Our own text: the READMEs and guides, and the blocks of code in them."""

import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "experiments").rglob("*.md")))
    if path.name != "model_card.md"  # a template
}
GUIDES = [page for page in PAGES if "/guides/" in page]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code: its page and section, the line on which it begins, and its language."""

    page: str
    section: str
    line: int
    language: str
    code: str

    def run(self, variables: dict[str, Any]) -> None:
        """Runs Python code; errors name the page and its line."""
        exec(compile("\n" * (self.line - 1) + self.code, self.page, "exec"), variables)


def blocks(page: str, *languages: str) -> list[Block]:
    """The blocks of a page in one of these languages."""
    found = []
    for match in _BLOCK.finditer(PAGES[page]):
        before = PAGES[page][: match.start(2)]
        section = re.findall(r"^## (.*)$", before, re.MULTILINE)[-1:] or [""]
        found.append(Block(page, *section, before.count("\n") + 1, *match.groups()))
    return [block for block in found if block.language in languages]


def commands(page: str) -> list[str]:
    """The lines of the shell blocks of a page."""
    return [line for block in blocks(page, "sh") for line in block.code.splitlines()]


def prose(page: str) -> str:
    """The text of a page without its blocks of code."""
    return _BLOCK.sub("", PAGES[page])
