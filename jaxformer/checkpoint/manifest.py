"""The manifest that commits a checkpoint: its files and arrays, written after all of them."""

import json
import os
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxformer.errors import CheckpointError
from jaxformer.training.parameters import flatten

NAME = "MANIFEST.json"
_FORMAT = 1
_CHUNK = 1 << 20
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "leaves": dict,
    "metadata": dict,
    "metric": (float, int, type(None)),
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
    folder: Path, leaves: dict[str, str], metadata: dict[str, Any], metric: float | None
) -> None:
    """Writes the manifest of the checkpoint in `folder`; all other files must be complete."""
    names = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME)
    files = {path.relative_to(folder).as_posix(): list(_length_and_sum(path)) for path in names}
    write(folder, Manifest(leaves, metadata, metric, files))


def write(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest`, with its own CRC-32 first, in place of the one in `folder` if any.

    A crash leaves the old manifest or the new one, complete.
    """
    rest = json.dumps({"format": _FORMAT, **manifest._asdict()}).encode()[1:]
    new = folder / f".{NAME}.new"
    with new.open("wb") as file:
        file.write(_start(rest) + rest)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / NAME)
    _sync(folder)


def is_committed(folder: Path) -> bool:
    """Whether `folder` has a manifest, damaged or not."""
    return (folder / NAME).exists()


def read(folder: Path) -> Manifest:
    """The manifest of `folder`; `CheckpointError` if it is missing or cannot be used."""
    path = folder / NAME
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    rest = text[len(_start(b"")) :]
    if text != _start(rest) + rest:
        raise CheckpointError(f"{path} is damaged: its bytes are not those that were written")
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


def check_lengths(folder: Path, manifest: Manifest) -> None:
    """Raises `CheckpointError`, with the file, if one is missing or has another length."""
    for name, (length, _) in manifest.files.items():
        path = folder / name
        try:
            there = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if there != length:
            raise CheckpointError(
                f"{path} is damaged: it has {there} bytes, and {length} were saved"
            )


def check(folder: Path, manifest: Manifest) -> None:
    """Raises `CheckpointError`, with the file, if one is not what was committed."""
    check_lengths(folder, manifest)
    for name, (length, crc) in manifest.files.items():
        path = folder / name
        try:
            same = _length_and_sum(path) == (length, crc)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if not same:
            raise CheckpointError(f"{path} is damaged: its CRC-32 is not that of what was saved")


def _start(rest: bytes) -> bytes:
    return b'{"crc32": "%08x", ' % zlib.crc32(rest)


def _length_and_sum(path: Path) -> tuple[int, int]:
    length = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            length, crc = length + len(chunk), zlib.crc32(chunk, crc)
    return length, crc


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


def _sync(folder: Path) -> None:
    """Flushes the names in `folder` to disk, on systems that can do that for a folder."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
