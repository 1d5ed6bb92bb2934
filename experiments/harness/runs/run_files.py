"""Small files of a run: lines, tables, and JSON with a checksum."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from experiments.harness.runs import datasets
from jaxformer import storage
from jaxformer.errors import ConfigError, DataError

REMEDY = "put the run's own file back, or use another --name"


class Record:
    """A JSON object that a run keeps in a file, written whole and with its CRC-32.

    A file without a checksum is accepted. `remedy` says what to do about a damaged one.
    """

    def __init__(self, path: Path, remedy: str = REMEDY):
        self.path = path
        self._remedy = remedy

    def read(self, **fields: type) -> dict[str, Any]:
        """The content, which has `fields` of these types; empty where there is no file.

        Raises `DataError` for a file that is no record or has been changed.
        """
        try:
            content = storage.read_json(self.path, default={})
            intact = content.pop("crc32", None) in (None, _sum(content))
            needed = fields if content else {}
            intact &= all(isinstance(content.get(name), kind) for name, kind in needed.items())
        except DataError:
            intact = False
        if not intact:
            raise DataError(f"{self.path} is damaged: {self._remedy}")
        return content

    def read_if_intact(self) -> dict[str, Any]:
        """The content; empty where the file is missing or damaged."""
        try:
            return self.read()
        except DataError:
            return {}

    def write(self, content: dict[str, Any]) -> None:
        """Replaces the content."""
        write_json(self.path, content | {"crc32": _sum(content)})

    def update(self, **facts: Any) -> None:
        """Adds `facts` to the content."""
        self.write(self.read() | facts)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` to `path` so that a crash leaves either the old file or the new one.

    For settings, which a person may edit; anything else that a run keeps is a `Record`.
    """
    storage.write(path, (json.dumps(content, indent=2) + "\n").encode())


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


def _sum(content: dict) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
