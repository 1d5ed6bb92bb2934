"""Tables of a run's samples: tab-separated files, a line for each text."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxformer import storage

_LINES_AT_ONCE = 10_000


def write_lines(path: str | Path, lines: Sequence[str]) -> None:
    """Writes each of `lines` as one line of the file `path`, making its folder if need be."""
    path = storage.to_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(one_line(line) + "\n" for line in lines).encode())


def write_table(path: Path, columns: Mapping[str, Sequence[str]]) -> None:
    """Writes `columns`, equally long, to `path`: tab-separated, with their names first."""
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    write_lines(path, ["\t".join(cell.replace("\t", " ") for cell in row) for row in rows])


def read_table(path: Path) -> dict[str, list[str]]:
    """The columns that `write_table` wrote."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    names, *rows = (line.split("\t") for line in lines)
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def lines_digest(*sides: Sequence[str]) -> str:
    """SHA-256 (hex) of all lines of parallel texts."""
    digest = hashlib.sha256()
    for side in sides:
        digest.update(f"{len(side)}\n".encode())
        for start in range(0, len(side), _LINES_AT_ONCE):  # a large text is not copied whole
            separator = "\n" if start else ""
            digest.update((separator + "\n".join(side[start : start + _LINES_AT_ONCE])).encode())
    return digest.hexdigest()


def one_line(text: str) -> str:
    """`text` without line feeds, which a model that writes bytes might write."""
    return text.replace("\n", " ").replace("\r", " ")
