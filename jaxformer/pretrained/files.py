"""Folders that others made: nothing outside them is read, and nothing whose size is absurd."""

import contextlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer import extras
from jaxformer.config import ConfigError
from jaxformer.pretrained.transforms import Shape
from jaxformer.tokenizers import DataError

_MIB = 2**20
_JSON_LIMIT = 16 * _MIB
_HEADER_LIMIT = 16 * _MIB
_TENSORS_LIMIT = 20_000
_TYPES = ("F16", "BF16", "F32")
_WEIGHTS, _INDEX, _PICKLE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
_BARE = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")


class Folder:
    """A folder whose files lie in it.

    A link may lead to another file of the folder, and in a hub's cache to the blobs beside the
    snapshots. Raises `ConfigError` where there is no folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ConfigError(f"{self.path} is not a folder: give one with a config.json")
        real = self.path.resolve()
        self._roots = [real]
        if real.parent.name == "snapshots":
            self._roots.append(real.parent.parent / "blobs")

    def has(self, name: str) -> bool:
        """Whether there is something of this name."""
        return os.path.lexists(self.path / name)

    def file(self, name: str, limit: int | None = None) -> Path:
        """The path of the file `name`.

        Raises `DataError` for one that is absent, leads out of the folder, is no regular file or
        has more than `limit` bytes.
        """
        path = self.path / name
        try:
            real = path.resolve(strict=True)
            status = real.stat()
        except (OSError, RuntimeError, ValueError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if not any(real.is_relative_to(root) for root in self._roots):
            raise DataError(f"{path} leads out of its folder: put the file itself there")
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is not a regular file")
        if limit is not None and status.st_size > limit:
            raise DataError(
                f"{path} has {status.st_size:,} bytes, but at most {limit:,} are read: it is not "
                "what its name says"
            )
        return path

    def json(self, name: str) -> dict[str, Any]:
        """The object in the JSON file `name`; `DataError` for what is none."""
        path = self.file(name, _JSON_LIMIT)
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not a whole JSON file: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"{path}: must hold an object, got {type(found).__name__}")
        return found


class Tensors:
    """The tensors in a folder's safetensors files; their headers are read at once.

    `shapes` are those of all tensors by name. Raises `DataError` for files that do not fit
    together or are damaged, and for a folder with weights that only torch can read.
    """

    def __init__(self, folder: Folder) -> None:
        self.shapes: dict[str, Shape] = {}
        self._types: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        if folder.has(_WEIGHTS):
            self._open(folder.file(_WEIGHTS), None)
        elif folder.has(_INDEX):
            self._open_parts(folder)
        elif folder.has(_PICKLE):
            raise DataError(
                f"{folder.path} has {_PICKLE}, which can run code when it is read, and no "
                f"{_WEIGHTS}: convert it with 'python -m "
                f"experiments.pytorch_twin.to_safetensors {folder.path}'"
            )
        else:
            raise DataError(f"{folder.path} has neither {_WEIGHTS} nor {_INDEX}")

    def read(self, name: str) -> np.ndarray:
        """The tensor `name` in float32.

        Raises `DataError` for another type than F16, BF16 and F32, and for numbers that are not
        finite.
        """
        if self._types[name] not in _TYPES:
            raise DataError(
                f"{name} has the type {self._types[name]}, but only {', '.join(_TYPES)} are read"
            )
        tensor = self._files[name].get_tensor(name).astype(np.float32)
        if not np.isfinite(tensor).all():
            raise DataError(f"{name} holds numbers that are not finite: the weights are damaged")
        return tensor

    def _open_parts(self, folder: Folder) -> None:
        places = folder.json(_INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise DataError(f"{folder.path / _INDEX}: weight_map must say where each tensor is")
        for file in places.values():
            if not isinstance(file, str) or not _BARE.fullmatch(file):
                raise DataError(
                    f"{folder.path / _INDEX}: {str(file)[:80]!r} is not the name of a safetensors "
                    "file in this folder"
                )
        if len(places) > _TENSORS_LIMIT:
            raise DataError(
                f"{folder.path / _INDEX}: {len(places):,} tensors, but at most "
                f"{_TENSORS_LIMIT:,} are read: this is not a model"
            )
        parts: dict[str, set[str]] = {}
        for name, file in places.items():
            parts.setdefault(file, set()).add(name)
        for file, names in sorted(parts.items()):
            self._open(folder.file(file), names)

    def _open(self, path: Path, wanted: set[str] | None) -> None:
        """Reads the header of one file, which must hold the tensors `wanted` and no others."""
        library = extras.load("safetensors")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(size) if size <= _HEADER_LIMIT else b""
        if size > _HEADER_LIMIT:
            raise DataError(
                f"{path}: a header of {size:,} bytes, but at most {_HEADER_LIMIT:,} are read: not "
                "a safetensors file"
            )
        try:
            opened = library.safe_open(path, "numpy")
        except (library.SafetensorError, OSError) as error:
            raise DataError(f"{path}: not a whole safetensors file: {error}") from error
        names = set(opened.keys())
        if wanted is not None and names != wanted:
            odd = sorted(names ^ wanted)[0]
            raise DataError(f"{path}: {odd} is in the file or in {_INDEX}, but not in both")
        if len(self.shapes) + len(names) > _TENSORS_LIMIT:
            raise DataError(
                f"{path}: {len(names):,} tensors, but at most {_TENSORS_LIMIT:,} are read: this is "
                "not a model"
            )
        repeated = _repeated(header)
        if repeated is not None:
            raise DataError(f"{path}: {repeated!r} stands twice in the header: it is ambiguous")
        for name in names:
            part = opened.get_slice(name)
            self.shapes[name] = tuple(part.get_shape())
            self._types[name] = part.get_dtype()
            self._files[name] = opened


def _repeated(header: bytes) -> str | None:
    """A name that stands twice in one object of the JSON text, None if none does or it is none."""
    found: list[str] = []

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        found.extend(name for name, count in counts.items() if count > 1)
        return dict(pairs)

    with contextlib.suppress(ValueError, RecursionError):
        json.loads(header, object_pairs_hook=read)
    return found[0][:80] if found else None


def check_layers(count: int, tensors: Mapping[str, Shape]) -> None:
    """Raises `ConfigError` for more layers than there are tensors, before anything is built."""
    if count > len(tensors):
        raise ConfigError(f"config.json asks for {count:,} layers, but has {len(tensors)} tensors")
