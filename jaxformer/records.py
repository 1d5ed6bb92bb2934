"""JSON files that are written whole, and records, which have a checksum besides."""

import json
import zlib
from pathlib import Path
from typing import Any

from jaxformer import storage
from jaxformer.errors import DataError

REMEDY = "put the run's own file back, or use another --name"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` to `path` so that a crash leaves either the old file or the new one.

    For settings, which a person may edit; anything else that a run keeps is a `Record`.
    """
    storage.write(path, (json.dumps(content, indent=2) + "\n").encode())


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


def _sum(content: dict) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
