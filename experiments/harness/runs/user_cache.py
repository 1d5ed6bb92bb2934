"""This user's cache folder: downloads, and copies of files in a bucket."""

import hashlib
import os
from pathlib import Path

from jaxformer import storage
from jaxformer.errors import DataError


def file_digest(path: Path) -> str:
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
    copy = cache_folder() / "buckets" / path.version() / path.name
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with storage.replacing(copy) as part:
            path.download(part)
    return copy


def cache_folder() -> Path:
    """The folder for downloads of this user: $XDG_CACHE_HOME/jaxformer, or ~/.cache/jaxformer."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "jaxformer"
