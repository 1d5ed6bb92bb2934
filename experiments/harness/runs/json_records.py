"""Small JSON files with a checksum, which record what a run's other files were made from."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from jaxformer.errors import DataError

REMEDY = "put the run's own file back, or use another --name"


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes `content`, which is JSON, and its CRC-32, which `read` checks."""
    text = json.dumps(content | {"crc32": _sum(content)}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path, fields: dict[str, type], remedy: str = REMEDY) -> dict[str, Any] | None:
    """The content of `path`, which has `fields` of these types; None where there is no file.

    A record without a checksum is accepted. Raises `DataError`, with the `remedy`, for a file that
    is no record or has been changed.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        intact = content.pop("crc32", None) in (None, _sum(content))
        intact = intact and all(isinstance(content[name], kind) for name, kind in fields.items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DataError(f"{path} is damaged: {remedy}")
    return content


def digest(path: Path) -> str:
    """SHA-256 (hex) of the file `path`; `DataError` where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _sum(content: dict) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"
