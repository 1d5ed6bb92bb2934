"""Files in a folder of this machine or in a bucket (gs://), by one kind of path.

A request to a bucket that fails for a while is repeated by gcsfs and tensorstore. A request that
fails for good is an `OSError` with the path, the reason and what to do.
"""

import errno
import hashlib
import json
import logging
import os
import posixpath
import shutil
import tempfile
import uuid
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError

Json = TypeVar("Json", dict[str, Any], list[Any])

_CHUNK = 1 << 20
# Loggers that repeat what is raised anyway, or report each place without credentials that they try.
_NOISY = ("gcsfs", "google.auth._default", "google.auth.compute_engine._metadata")
_CHANGES = {
    "pipe_file": "written",
    "put_file": "written",
    "cp_file": "written",
    "rm_file": "removed",
    "rm": "removed",
}
"""Methods of fsspec that change a file -> what they do to it, for messages; all others read it."""
_NOT_FLUSHED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of fsync on a file system that lacks it, for folders or for all files."""
_REFUSALS = ("forbidden", "denied", "permission", "credential", "401", "403")
"""Words in the message of a bucket that does not allow a request."""


def to_path(name: str | os.PathLike[str]) -> Path:
    """The path `name`: of a folder or file here, or of one in a bucket (gs://).

    A first part "~" is the user's home: a shell leaves it in `--runs=~/a` and in quotes.
    Raises `ConfigError` for an address of another kind, `MissingExtra` without the package that
    reaches the bucket.
    """
    scheme, separator, rest = os.fspath(name).partition("://")
    if not separator:
        local = Path(name)
        return Path(os.path.expanduser(local)) if local.parts[:1] == ("~",) else local
    if scheme != "gs":
        raise ConfigError(
            f"{name} is at a kind of address that is not known: give a folder or gs://bucket/path"
        )
    optional_dependencies.load("gcsfs")
    for logger in _NOISY:
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    from fsspec.config import conf  # not where all is local

    # A remembered listing would hide what tensorstore and other processes write.
    conf.setdefault("gcs", {})["use_listings_cache"] = False
    path: Any = BucketPath(f"gs://{posixpath.normpath(rest)}")  # "..": a bucket does not know it
    return path


def to_local_path(name: str | os.PathLike[str]) -> Path:
    """The path `name` of this machine; `ConfigError` for one in a bucket."""
    if "://" in os.fspath(name):
        raise ConfigError(f"{name} is in a bucket: give a folder of this machine")
    return to_path(name)


def is_in_bucket(path: Path) -> bool:
    """Whether `path` is in a bucket, where a file is written whole, and never appended to."""
    return isinstance(path, BucketPath)


class BucketPath(PurePosixPath):
    """A path in a bucket, gs://bucket/path. A file is replaced whole; folders need not be made.

    It has the methods of `Path` that jaxformer uses. `etils.epath` is not used for them: its paths
    say that a folder does not exist when the bucket cannot be reached.
    """

    def __str__(self) -> str:
        return super().__str__().replace("gs:/", "gs://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def exists(self) -> bool:
        """Whether there is a file, or a folder with files."""
        return self._kind() != ""

    def is_dir(self) -> bool:
        """Whether files have this path as a folder."""
        return self._kind() == "directory"

    def is_file(self) -> bool:
        """Whether there is a file."""
        return self._kind() == "file"

    def absolute(self) -> "BucketPath":
        """This path, which begins with its bucket."""
        return self

    resolve = absolute

    def iterdir(self) -> Iterator["BucketPath"]:
        """The files and folders of a folder; none where there is no such folder."""
        return self.glob("*")

    def glob(self, pattern: str) -> Iterator["BucketPath"]:
        """The files and folders whose names match `pattern`, in order."""
        paths = self.request("glob", f"{self}/{pattern}")
        return (BucketPath(f"gs://{path}") for path in sorted(paths))

    def rglob(self, pattern: str) -> Iterator["BucketPath"]:
        """The files and folders in and below this folder whose names match `pattern`."""
        return self.glob(f"**/{pattern}")

    def open(self, mode: str = "rb") -> Any:
        """A file to be read."""
        return self.request("open", str(self), mode)

    def read_bytes(self) -> bytes:
        """The bytes of a file."""
        return self.request("cat_file", str(self))

    def read_text(self, encoding: str | None = None) -> str:
        """The text of a file."""
        return self.read_bytes().decode(encoding or "utf-8")

    def write_bytes(self, data: bytes) -> int:
        """Replaces the whole file."""
        self.request("pipe_file", str(self), data)
        return len(data)

    def write_text(self, data: str, encoding: str | None = None) -> int:
        """Replaces the whole file."""
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def create(self, data: bytes) -> bool:
        """Writes a file if there is none of its name; whether it did."""
        try:
            self.request("pipe_file", str(self), data, mode="create")
        except FileExistsError:
            return False
        return True

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes a file."""
        try:
            self.request("rm_file", str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def mkdir(self, *_: Any, **__: Any) -> None:
        """No-op: a folder is there when it has a file."""

    def replace_by(self, source: Path) -> None:
        """Replaces the whole file by the file `source`, which is here or in the bucket."""
        method = "cp_file" if is_in_bucket(source) else "put_file"
        self.request(method, str(source), str(self))

    def download(self, target: Path) -> None:
        """Writes the file to the local file `target`."""
        self.request("get_file", str(self), str(target))

    def version(self) -> str:
        """A name for the content of a file; copies within a bucket have the same."""
        info = self.request("info", str(self))
        known = [info["size"], *(info.get(name) for name in ("md5Hash", "crc32c"))]
        return hashlib.sha256(repr(known).encode()).hexdigest()[:32]

    def modified(self) -> float:
        """The time in seconds when a file was written."""
        return self.request("modified", str(self)).timestamp()

    def _kind(self) -> str:
        try:
            return self.request("info", str(self))["type"]
        except FileNotFoundError:
            return ""

    def request(self, method: str, *args: Any, **named: Any) -> Any:
        """The result of a method of fsspec; its error says the path, the reason and what to do."""
        import fsspec

        try:
            return getattr(fsspec.filesystem("gs"), method)(*args, **named)
        except FileExistsError:
            raise
        except Exception as error:  # gcsfs has classes of its own
            raise _explained(error, self, _CHANGES.get(method, "read")) from error


def _explained(error: Exception, path: BucketPath, use: str) -> OSError:
    """The error of a request to `path`; `use` is "written", "removed" or "read"."""
    advice = "check the network, or try again later"
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        bucket = path.parts[1]
        if use != "written":
            message = f"No such file, or no bucket {bucket!r}: correct the name"
            return FileNotFoundError(errno.ENOENT, message, str(path))
        advice = f"create the bucket {bucket!r}, or correct its name"
    elif any(word in f"{type(error).__name__} {reason}".lower() for word in _REFUSALS):
        advice = f"use credentials that allow it to be {use}"
    return OSError(errno.EIO, f"cannot be {use} ({reason}): {advice}", str(path))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of a new local file that becomes `path` when the block ends, unless it raises.

    Each writer has a file of its own, so that the last of several at once wins. An `OSError`
    that names no file gets the name of `path`.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        with naming(path):
            yield unfinished
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Within it, an `OSError` that names no file, as a failed write's, gets the name `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write(path: Path, content: bytes) -> None:
    """Writes a file whole, in place of an older one: a crash leaves the old or the new content."""
    if is_in_bucket(path):
        path.write_bytes(content)
        return
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        flush(file.fileno())
    _sync(path.parent)


def read_json(path: Path, kind: type[Json] = dict, default: Any = None) -> Json:  # type: ignore[assignment]
    """The value of `kind` in a JSON file; `default`, unless None, where there is no such file.

    Raises `DataError` for a file that cannot be read or has no value of `kind`.
    """
    if default is not None and not path.exists():
        return default
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a whole JSON file: {error}") from error
    if not isinstance(content, kind):
        wanted = "an object" if kind is dict else "a list"
        raise DataError(f"{path}: must hold {wanted}, got {type(content).__name__}")
    return content


def remove(path: Path) -> None:
    """Removes a file, which may be missing; on disk it is gone before any later change is made."""
    path.unlink(missing_ok=True)
    if not is_in_bucket(path):
        _sync(path.parent)


def remove_tree(folder: Path) -> None:
    """Removes `folder` and all files in it, as far as that succeeds."""
    if isinstance(folder, BucketPath):
        with suppress(OSError):
            folder.request("rm", str(folder), recursive=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def modified(path: Path) -> float:
    """The time in seconds when the file `path` was written; `FileNotFoundError` without one."""
    return path.modified() if isinstance(path, BucketPath) else path.stat().st_mtime


def lengths(folder: Path) -> dict[str, int]:
    """Length in bytes of each file under `folder`, by its path relative to it, sorted."""
    files = {}
    if isinstance(folder, BucketPath):
        root = f"{folder}/".partition("://")[2]
        with suppress(FileNotFoundError):
            for name, info in folder.request("find", str(folder), detail=True).items():
                if name.startswith(root):  # another folder's name may begin with this one's
                    files[name.removeprefix(root)] = info["size"]
    else:
        for top, _, names in os.walk(folder):
            for path in (Path(top, name) for name in names):
                with suppress(FileNotFoundError):  # another thread has renamed it
                    files[path.relative_to(folder).as_posix()] = path.stat().st_size
    return dict(sorted(files.items()))


def folders(folder: Path) -> dict[str, dict[str, int]]:
    """The `lengths` of each folder in `folder`, by its name."""
    if not is_in_bucket(folder):
        entries = folder.iterdir() if folder.is_dir() else ()
        return {entry.name: lengths(entry) for entry in entries if entry.is_dir()}
    listed: dict[str, dict[str, int]] = {}
    for name, length in lengths(folder).items():
        top, separator, file = name.partition("/")
        if separator:
            listed.setdefault(top, {})[file] = length
    return listed


def length_and_sum(path: Path) -> tuple[int, int]:
    """The length and the CRC-32 of a file; `FileNotFoundError` if there is none."""
    length = crc = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                length += len(chunk)
                crc = zlib.crc32(chunk, crc)
    except Exception as error:
        if isinstance(path, BucketPath):
            raise _explained(error, path, "read") from error
        raise
    return length, crc


@contextmanager
def written_here(folder: Path) -> Iterator[Path]:
    """A local folder to write to. For a bucket, its files are uploaded at the end."""
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


def _sync(folder: Path) -> None:
    """Flushes the names in `folder` to disk, on systems that can do that for a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def flush(descriptor: int) -> None:
    """Returns when what was written to an open file is on disk, or the names in an open folder.

    On a file system that cannot do that it returns at once, with one warning in a process.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_FLUSHED:
            raise
        warnings.warn(
            f"this file system does not flush what is written to it ({error.strerror}): after a "
            "loss of power the newest files may be damaged",
            stacklevel=1,  # the same place each time, so that it is shown once
        )
