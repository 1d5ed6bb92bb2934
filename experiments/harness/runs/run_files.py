"""Small files of a run: lines, tables, and copies of files in a bucket."""

import hashlib
from pathlib import Path

from experiments.harness.runs import datasets
from jaxformer import storage
from jaxformer.errors import ConfigError, DataError


def digest(path: Path) -> str:
    """SHA-256 (hex) of the file `path`; `DataError` where it cannot be read."""
    try:
        with local_copy(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def local_copy(path: Path) -> Path:
    """The file `path`; a copy of it, which the user's cache keeps, if it is in a bucket."""
    if not isinstance(path, storage.BucketPath):
        return path
    copy = datasets.cache_folder() / "buckets" / path.version() / path.name
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with storage.replacing(copy) as part:
            path.download(part)
    return copy


def check_output(output: str, *inputs: str) -> None:
    """Raises `ConfigError` where the file `output` is one of `inputs`, which it would replace."""
    for name in inputs:
        paths = Path(output), Path(name)
        if output and name and all(map(Path.exists, paths)) and paths[0].samefile(paths[1]):
            raise ConfigError(f"{output} is the input: give the output another name")


def write_lines(path: str | Path, lines: list[str]) -> None:
    """Writes each of `lines` as one line of the file `path`, making its folder if need be."""
    path = storage.to_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(one_line(line) + "\n" for line in lines).encode())


def write_table(path: Path, columns: dict[str, list[str]]) -> None:
    """Writes `columns`, equally long, to `path`: tab-separated, with their names first."""
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    write_lines(path, ["\t".join(cell.replace("\t", " ") for cell in row) for row in rows])


def read_table(path: Path) -> dict[str, list[str]]:
    """The columns that `write_table` wrote."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    names, *rows = (line.split("\t") for line in lines)
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def lines_digest(*sides: list[str]) -> str:
    """SHA-256 (hex) of all lines of parallel texts."""
    digest = hashlib.sha256()
    for side in sides:
        digest.update(f"{len(side)}\n".encode())
        digest.update("\n".join(side).encode())
    return digest.hexdigest()


def one_line(text: str) -> str:
    """`text` without line feeds, which a model that writes bytes might write."""
    return text.replace("\n", " ").replace("\r", " ")
