"""The manifest that commits a checkpoint: its files and arrays, written after all of them."""

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxformer import storage
from jaxformer.errors import CheckpointError
from jaxformer.training.parameters import flatten

NAME = "MANIFEST.json"
_FORMAT = 1
_AT_ONCE = 16  # files that are read at a time
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "leaves": dict,
    "metadata": dict,
    "metric": (float, int, type(None)),
    "regular": bool,
    "files": dict,
}


class Manifest(NamedTuple):
    """The content of a checkpoint."""

    leaves: dict[str, str]
    """`dtype[shape]` of each array, by its path in the state."""
    metadata: dict[str, Any]
    """Data of the caller, saved with the state."""
    metric: float | None
    """The lower, the better; None if the checkpoint was not evaluated."""
    regular: bool
    """Whether it is one of the newest that are kept; any other goes when it is neither the newest
    nor the best."""
    files: dict[str, list[int]]
    """Length in bytes and CRC-32 of each file, by its name in the folder."""


def describe(tree: Any) -> dict[str, str]:
    """The `leaves` of a manifest: {"path/of/leaf": "dtype[shape]"}."""
    return {
        path: f"{jnp.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
        for path, leaf in flatten(tree).items()
    }


def differences(stored: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The missing, extra and different leaves, parameters first."""
    paths = sorted(
        expected.keys() | stored.keys(), key=lambda path: (not path.startswith("params/"), path)
    )
    return [
        f"{path} is {stored.get(path, 'absent')} in the checkpoint but "
        f"{expected.get(path, 'absent')} here"
        for path in paths
        if expected.get(path) != stored.get(path)
    ]


def commit(
    folder: Path,
    manifest: Manifest,
    check: Callable[[], None],
) -> None:
    """Writes `manifest`, with the `files` in `folder`, all of which must be complete.

    Their bytes are read before. `check` is called at last, and may raise.
    """
    names = [name for name in storage.lengths(folder) if name != NAME]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sums = pool.map(storage.length_and_sum, [folder / name for name in names])
        files = {name: list(entry) for name, entry in zip(names, sums, strict=True)}
    check()
    write(folder, manifest._replace(files=files))


def write(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest`, with its own CRC-32 first, in place of the one in `folder` if any.

    A crash leaves the old manifest or the new one, complete.
    """
    content = {"format": _FORMAT, **manifest._asdict()}
    body = json.dumps(content, allow_nan=False).encode()[1:]
    storage.write(folder / NAME, _start(body) + body)


def read(folder: Path) -> Manifest:
    """The manifest of `folder`; `CheckpointError` if it is missing or cannot be used."""
    path = folder / NAME
    with _reading(path):
        text = path.read_bytes()
    body = text[len(_start(b"")) :]
    if text != _start(body) + body:
        raise CheckpointError(f"{path} is damaged: its bytes are not what was written")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if content.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')}, and this version reads format {_FORMAT}: "
            "use the version that wrote it"
        )
    if not _well_formed(content):
        raise CheckpointError(f"{path} is not a manifest: a field is missing or of another type")
    return Manifest(**{name: content[name] for name in _FIELDS})


def check_lengths(folder: Path, manifest: Manifest, lengths: dict[str, int]) -> None:
    """Raises `CheckpointError`, with the file, if one is missing or has another length.

    `lengths` are the lengths of the files in `folder`, as `storage.lengths` returns them.
    """
    for name, (length, _) in manifest.files.items():
        path = folder / name
        with _reading(path):
            if name not in lengths:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if lengths[name] != length:
            raise CheckpointError(
                f"{path} is damaged: it has {lengths[name]} bytes, and {length} were saved"
            )


def check(folder: Path, manifest: Manifest) -> None:
    """Raises `CheckpointError`, with the file, if one is not what was committed."""
    check_lengths(folder, manifest, storage.lengths(folder))

    def check_sum(name: str) -> None:
        path = folder / name
        with _reading(path):
            same = list(storage.length_and_sum(path)) == manifest.files[name]
        if not same:
            raise CheckpointError(f"{path} is damaged: its CRC-32 is not the saved one")

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(check_sum, manifest.files):
            pass


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns a failed local read into `CheckpointError`; a bucket's stay as they are."""
    try:
        yield
    except OSError as error:
        if storage.is_in_bucket(path) and not isinstance(error, FileNotFoundError):
            raise
        reason = error.strerror or os.strerror(errno.ENOENT)
        raise CheckpointError(f"{path} cannot be read: {reason}") from error


def _start(body: bytes) -> bytes:
    return b'{"crc32": "%08x", ' % zlib.crc32(body)


def _well_formed(content: dict[str, Any]) -> bool:
    if not all(isinstance(content.get(name, ...), kind) for name, kind in _FIELDS.items()):
        return False
    for name, entry in content["files"].items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name:
            return False  # it would read a file outside the folder
        if not isinstance(entry, list) or [type(number) for number in entry] != [int, int]:
            return False
    return all(isinstance(shape, str) for shape in content["leaves"].values())
