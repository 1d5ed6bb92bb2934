"""Paths of runs: in a folder of this machine, or in a bucket of object storage."""

import errno
import hashlib
import os
import posixpath
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from etils.epath.gpath import PosixGPath

_REMEDY = "check the name of the bucket, the network, and what your credentials allow"


def to_path(name: str | os.PathLike[str]) -> Path:
    """The path `name`: of a folder or file here, or of one in a bucket (gs://, s3://).

    Raises `ConfigError` for an address of another kind, `MissingExtra` without the package that
    reaches the bucket.
    """
    if "://" not in os.fspath(name):
        return Path(name)
    from jaxformer.checkpoint.storage import as_path  # not where all is local: it needs orbax

    path: Any = BucketPath(as_path(name)).resolve()  # has what is used of a `Path`
    return path


def is_in_bucket(path: Path) -> bool:
    """Whether `path` is in a bucket, where a file is written whole, and never appended to."""
    return isinstance(path, BucketPath)


class BucketPath(PosixGPath):
    """A path in a bucket. A file is replaced whole or not at all; folders need not be made.

    What fails for a while is tried again by gcsfs or s3fs. What fails for good raises `OSError`
    with the path and the reason.
    """

    def exists(self) -> bool:
        """Whether there is a file, or a folder with files."""
        return self._kind() != ""

    def is_dir(self) -> bool:
        """Whether files have this path as a folder."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Whether there is a file."""
        return self._kind() == "file"

    def iterdir(self) -> Iterator["BucketPath"]:  # type: ignore[override]
        """The files and folders of a folder; none where there is no such folder."""
        return self.glob("*")

    def glob(self, pattern: str) -> Iterator["BucketPath"]:  # type: ignore[override]
        """The files and folders whose names match `pattern`, in order."""
        paths = self._call("glob", f"{self}/{pattern}")
        return (self._new(f"{self._uri_scheme}://{path}") for path in sorted(paths))

    def read_bytes(self) -> bytes:
        """The bytes of a file."""
        return self._call("cat_file", str(self))

    def read_text(self, encoding: str | None = None) -> str:
        """The text of a file."""
        return self.read_bytes().decode(encoding or "utf-8")

    def write_bytes(self, data: bytes) -> int:  # type: ignore[override]
        """Replaces the whole file."""
        self._call("pipe_file", str(self), data)
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, errors: str | None = None) -> int:
        """Replaces the whole file."""
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes a file."""
        if not missing_ok or self.exists():
            self._call("rm_file", str(self))

    def mkdir(self, *_: Any, **__: Any) -> None:
        """No-op: a folder is there when it has a file."""

    def resolve(self, strict: bool = False) -> "BucketPath":  # type: ignore[override]
        """The path without "..", which object storage does not know."""
        return self._new(posixpath.normpath(posixpath.join(*self.parts)))

    def replace_by(self, source: Path) -> None:
        """Replaces the whole file by the file `source`, which is here or in the bucket."""
        method = "cp_file" if is_in_bucket(source) else "put_file"
        self._call(method, str(source), str(self))

    def download(self, target: Path) -> None:
        """Writes the file to the local file `target`."""
        self._call("get_file", str(self), str(target))

    def version(self) -> str:
        """A name for the content of a file; copies within a bucket have the same."""
        info = self._call("info", str(self))
        known = [info["size"], *(info.get(name) for name in ("md5Hash", "crc32c", "ETag"))]
        return hashlib.sha256(repr(known).encode()).hexdigest()[:32]

    def modified(self) -> float:
        """The time in seconds when a file was written."""
        return self._call("modified", str(self)).timestamp()

    def _kind(self) -> str:
        try:
            return self._call("info", str(self))["type"]
        except FileNotFoundError:
            return ""

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(fsspec.filesystem(self._uri_scheme), method)(*args)
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "No such file or bucket", str(self)) from error
        except Exception as error:  # each package has classes of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise OSError(errno.EIO, f"{reason}: {_REMEDY}", str(self)) from error


def modified(path: Path) -> float:
    """The time in seconds when the file `path` was written; `FileNotFoundError` without one."""
    return path.modified() if isinstance(path, BucketPath) else path.stat().st_mtime


@contextmanager
def written_here(folder: Path) -> Iterator[Path]:
    """Yields a local folder whose files are in `folder` when the block ends: `folder`, if local."""
    folder.mkdir(parents=True, exist_ok=True)
    if not is_in_bucket(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as local:
        yield Path(local)
        upload(Path(local), folder)


def upload(local: Path, folder: Path) -> None:
    """Copies all files in and below `local` to `folder`, which is in a bucket."""
    for path in local.rglob("*"):
        target: Any = folder / path.relative_to(local)
        if path.is_file():
            target.replace_by(path)
