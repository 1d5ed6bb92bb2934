"""Files in a folder of this machine or in a bucket (gs://, s3://), by one set of functions.

A request to a bucket that fails for a while is repeated by gcsfs, s3fs and tensorstore. What fails
for good is an `OSError` with what to do.
"""

import json
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError

_CHUNK = 1 << 20
_PACKAGES = {"gs": "gcsfs", "s3": "s3fs"}
# Loggers that report what is also raised, and that they find no credentials before they look on.
_NOISY = ("gcsfs", "google.auth._default", "google.auth.compute_engine._metadata")
_REFUSALS = ("forbidden", "denied", "permission", "credential", "401", "403")


def as_path(folder: str | os.PathLike[str]) -> epath.Path:
    """`folder` as an absolute path, or as that of a bucket where it is a gs:// or s3:// URL.

    Raises `ConfigError` for another kind of URL and `MissingExtra` without the bucket's package.
    """
    scheme, separator, _ = os.fspath(folder).partition("://")
    if not separator:
        return epath.Path(Path(folder).absolute())
    if scheme not in _PACKAGES:
        raise ConfigError(
            f"{folder} is at a kind of address that is not known: give a folder, gs://bucket/path "
            "or s3://bucket/path"
        )
    optional_dependencies.load(_PACKAGES[scheme])
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from fsspec.config import conf

    # A remembered listing would hide what tensorstore and other processes write.
    conf.setdefault({"gs": "gcs"}.get(scheme, scheme), {})["use_listings_cache"] = False
    if scheme == "s3":
        _let_orbax_use_s3()
    return epath.Path(folder)


def is_bucket(path: epath.Path) -> bool:
    """Whether `path` is in a bucket."""
    return "://" in os.fspath(path)


def make_writer(folder: epath.Path) -> ocp.AsyncCheckpointer:
    """Orbax's writer of checkpoints, which marks the end of one where nothing can be renamed."""
    way = ocp.path.atomicity.CommitFileTemporaryPath if is_bucket(folder) else None
    options = ocp.CompositeOptions(temporary_path_class=way)
    handler = ocp.CompositeCheckpointHandler(composite_options=options)
    return ocp.AsyncCheckpointer(handler, temporary_path_class=way)


def lengths(folder: epath.Path) -> dict[str, int]:
    """Length in bytes of each file under `folder`, by its name there, sorted."""
    files = {}
    if is_bucket(folder):
        system, root = _open(folder)
        with _requests(folder), suppress(FileNotFoundError):
            for name, info in system.find(root, detail=True).items():
                files[name.removeprefix(f"{root}/")] = info["size"]
    else:
        for top, _, names in os.walk(folder):
            for path in (Path(top, name) for name in names):
                with suppress(FileNotFoundError):  # another thread has renamed it
                    files[path.relative_to(folder).as_posix()] = path.stat().st_size
    return dict(sorted(files.items()))


def folders(folder: epath.Path) -> dict[str, dict[str, int]]:
    """The `lengths` of each folder in `folder`, by its name."""
    if not is_bucket(folder):
        entries = folder.iterdir() if folder.is_dir() else ()
        return {entry.name: lengths(entry) for entry in entries if entry.is_dir()}
    listed: dict[str, dict[str, int]] = {}
    for name, length in lengths(folder).items():
        top, separator, file = name.partition("/")
        if separator:
            listed.setdefault(top, {})[file] = length
    return listed


def read(path: epath.Path) -> bytes:
    """The bytes of a file; `FileNotFoundError` if there is none."""
    with _requests(path):
        return path.read_bytes()


def length_and_sum(path: epath.Path) -> tuple[int, int]:
    """The length and the CRC-32 of a file; `FileNotFoundError` if there is none."""
    length = crc = 0
    with _requests(path), path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            length, crc = length + len(chunk), zlib.crc32(chunk, crc)
    return length, crc


def write(path: epath.Path, content: bytes) -> None:
    """Writes a file whole, in place of an older one: a crash leaves the old or the new content."""
    if is_bucket(path):
        with _requests(path, writing=True):
            path.write_bytes(content)
        return
    new = Path(path.parent, f".{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync(path.parent)


def create(path: epath.Path, content: bytes) -> bool:
    """Writes an object of a bucket if there is none of its name; whether it did."""
    system, name = _open(path)
    try:
        with _requests(path, writing=True):
            system.pipe_file(name, content, mode="create")
    except FileExistsError:
        return False
    return True


def remove(path: epath.Path) -> None:
    """Removes a file, which may be missing."""
    with _requests(path, writing=True), suppress(FileNotFoundError):
        path.unlink()
    if not is_bucket(path):
        _sync(path.parent)


def remove_tree(folder: epath.Path) -> None:
    """Removes `folder` and all files in it, as far as that succeeds."""
    with suppress(OSError), _requests(folder):
        folder.rmtree()


def copy(old: epath.Path, new: epath.Path) -> None:
    """Copies an object within a bucket."""
    with _requests(new, writing=True):
        system, name = _open(old)
        system.cp_file(name, _open(new)[1])


def _open(path: epath.Path) -> tuple[Any, str]:
    """The file system of fsspec that `path` uses, and the name of `path` in it."""
    from fsspec.core import url_to_fs

    return url_to_fs(os.fspath(path))


@contextmanager
def _requests(path: epath.Path, *, writing: bool = False) -> Iterator[None]:
    """Errors of requests to a bucket say what to do; those of a local disk are unchanged.

    So are those that say whether an object is there.
    """
    try:
        yield
    except Exception as error:  # each package raises errors of its own
        missing = isinstance(error, FileNotFoundError)
        if not is_bucket(path) or isinstance(error, FileExistsError) or missing and not writing:
            raise
        said = " ".join(str(error).split()) or type(error).__name__
        use = "written" if writing else "read"
        advice = "try again later"
        if missing:
            advice = f"create the bucket {os.fspath(path).split('/')[2]!r}, or correct its name"
        elif any(word in f"{type(error).__name__} {said}".lower() for word in _REFUSALS):
            advice = f"use credentials that allow it to be {use}"
        raise OSError(f"{path} cannot be {use} ({said}): {advice}") from error


def _sync(folder: epath.Path) -> None:
    """Flushes the names in `folder` to disk, on systems that can do that for a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _let_orbax_use_s3() -> None:
    """Orbax leads tensorstore to s3:// as it does to gs://; orbax 0.12 knows only the latter."""
    from orbax.checkpoint._src.serialization import tensorstore_utils

    build = tensorstore_utils.build_kvstore_tspec
    if build.__name__ == "build_kvstore_of_s3":
        return

    def build_kvstore_of_s3(directory: str, *args: Any, **named: Any) -> Any:
        if not directory.startswith("s3://"):
            return build(directory, *args, **named)
        spec = build(f"gs{directory[2:]}", *args, **named)
        return json.loads(json.dumps(spec), object_hook=_of_s3)

    tensorstore_utils.build_kvstore_tspec = build_kvstore_of_s3


def _of_s3(spec: dict[str, Any]) -> dict[str, Any]:
    """A part of tensorstore's JSON with the driver of Amazon's buckets in place of Google's."""
    if spec.get("driver") not in ("gcs", "gcs_grpc"):
        return spec
    spec = spec | {"driver": "s3"}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise it reports each other kind of credentials
        spec |= {"aws_credentials": {"type": "environment"}}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:  # a storage that is not Amazon's; tensorstore asks for its region
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return spec
