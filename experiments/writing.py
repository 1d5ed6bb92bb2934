"""Text files of one text a line."""

from pathlib import Path


def write_lines(path: Path, lines: list[str]) -> None:
    """Writes each of `lines` as one line of the file `path`, making its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(one_line(line) + "\n" for line in lines).encode())


def one_line(text: str) -> str:
    """`text` without line feeds, which a model that writes bytes might write."""
    return text.replace("\n", " ").replace("\r", " ")
