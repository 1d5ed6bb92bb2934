"""Folders of `transformers`: found, opened and read with limits.

A folder may come from a stranger, so no file outside it is read, and none of absurd size.
"""

import contextlib
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError, MissingExtra, shorten
from jaxformer.pretrained.weight_map import Shape

_MIB = 2**20
_CHUNK = 2**16
_JSON_LIMIT = 16 * _MIB
_HEADER_LIMIT = 16 * _MIB
_TENSORS_LIMIT = 20_000
_TYPES = {"F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32}
_WHOLE, _INDEX, _PICKLE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
)
_BARE = re.compile(r"[A-Za-z0-9][\w.-]*\.safetensors")


_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.spm", "*.model"]


def locate(name: str | os.PathLike[str]) -> Path:
    """The folder `name`; if there is none, the hub's model of this name, downloaded.

    Raises `MissingExtra` for a hub's name without `huggingface_hub`, `ConfigError` for a name that
    the hub does not have.
    """
    path = Path(name)
    if path.exists() or not isinstance(name, str) or not _HUB_NAME.fullmatch(name):
        return path
    try:
        library = optional_dependencies.load("huggingface_hub")
    except MissingExtra as error:
        raise MissingExtra(f"{name} is not a folder; as a hub's name, {error}") from error
    try:
        return Path(library.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{name} is not a folder, and the hub does not give it: {shorten(str(error), 300)}"
        ) from error


class HFFolder:
    """A folder whose files are read only if they are inside it.

    A link may lead to another file of the folder, and in a hub's cache to the folder `blobs`.
    Raises `ConfigError` if `path` is not a folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path)
        if not self.path.is_dir():
            raise ConfigError(f"{self.path} is not a folder: give one with a config.json")
        real = self.path.resolve()
        self._roots = [real]
        if real.parent.name == "snapshots":
            self._roots.append(real.parent.parent / "blobs")

    def has(self, name: str) -> bool:
        """Whether the folder has an entry `name`."""
        return os.path.lexists(self.path / name)

    def file(self, name: str, limit: int | None = None) -> Path:
        """The path of the file `name`.

        Raises `DataError` if it is absent, leads out of the folder, is not a regular file or has
        more than `limit` bytes.
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
                f"{path} has {status.st_size:,} bytes, but at most {limit:,} are read: put the "
                "right file there"
            )
        return path

    def json(self, name: str) -> dict[str, Any]:
        """The object in the JSON file `name`; `DataError` for a file without a JSON object."""
        path = self.file(name, _JSON_LIMIT)
        try:
            found = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not a whole JSON file: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"{path}: must hold an object, got {type(found).__name__}")
        return found


class Tensors:
    """The tensors in the safetensors files of a folder; only the headers are read at first.

    Attribute: `shapes` of all tensors by name. Raises `DataError` for files that are damaged or do
    not fit together, and for a folder with weights that only torch can read.
    """

    def __init__(self, folder: HFFolder) -> None:
        self.shapes: dict[str, Shape] = {}
        self._types: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        if folder.has(_WHOLE):
            self._open(folder.file(_WHOLE), None)
        elif folder.has(_INDEX):
            self._open_parts(folder)
        elif folder.has(_PICKLE):
            raise DataError(
                f"{folder.path} has {_PICKLE}, which can run code when it is read, and no "
                f"{_WHOLE}: convert it with 'python -m "
                f"experiments.torch_reference.to_safetensors --folder {folder.path}'"
            )
        else:
            raise DataError(f"{folder.path} has neither {_WHOLE} nor {_INDEX}")

    def read(self, name: str, *, mapped: bool = False) -> Float[np.ndarray, "*shape"]:
        """The tensor `name` in the type in which it is stored.

        With `mapped` the array is a view of the file, of which only what is used is in memory.
        Raises `DataError` for another type than F16, BF16 and F32, and for numbers that are not
        finite.
        """
        if self._types[name] not in _TYPES:
            raise DataError(
                f"{name} has the type {self._types[name]}, but only {', '.join(_TYPES)} are read"
            )
        if mapped and np.prod(self.shapes[name]):
            path, start = self._places[name]
            kind = np.dtype(_TYPES[self._types[name]])
            tensor: np.ndarray = np.memmap(path, kind, "r", start, self.shapes[name])
        else:
            tensor = self._files[name].get_tensor(name)
        flat = tensor.reshape(-1)
        parts = (flat[i : i + _CHUNK] for i in range(0, flat.size, _CHUNK))
        if not all(np.isfinite(part).all() for part in parts):
            raise DataError(f"{name} holds numbers that are not finite: the weights are damaged")
        return tensor

    def _open_parts(self, folder: HFFolder) -> None:
        places = folder.json(_INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise DataError(f"{folder.path / _INDEX}: weight_map must say where each tensor is")
        for file in places.values():
            if not isinstance(file, str) or not _BARE.fullmatch(file):
                raise DataError(
                    f"{folder.path / _INDEX}: {shorten(str(file))!r} is not the name of a "
                    "safetensors file in this folder"
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

    def _open(self, path: Path, expected: set[str] | None) -> None:
        """Reads the header of one file, which must hold exactly the tensors `expected`."""
        library = optional_dependencies.load("safetensors")
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
        if expected is not None and names != expected:
            odd = sorted(names ^ expected)[0]
            raise DataError(f"{path}: {odd} is in only one of the file and {_INDEX}")
        if len(self.shapes) + len(names) > _TENSORS_LIMIT:
            raise DataError(
                f"{path}: {len(names):,} tensors, but at most {_TENSORS_LIMIT:,} are read: this is "
                "not a model"
            )
        repeated = _repeated_name(header)
        if repeated is not None:
            raise DataError(
                f"{path}: {repeated!r} occurs twice in the header, so its tensor is ambiguous"
            )
        fields = json.loads(header)
        for name in names:
            part = opened.get_slice(name)
            self._places[name] = path, 8 + size + fields[name]["data_offsets"][0]
            self.shapes[name] = tuple(part.get_shape())
            self._types[name] = part.get_dtype()
            self._files[name] = opened


def _repeated_name(header: bytes) -> str | None:
    """A name that occurs twice in an object of the JSON text, or None."""
    found: list[str] = []

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        found.extend(name for name, count in counts.items() if count > 1)
        return dict(pairs)

    with contextlib.suppress(ValueError, RecursionError):
        json.loads(header, object_pairs_hook=read)
    return shorten(found[0]) if found else None


def check_layers(count: int, tensors: Mapping[str, Shape]) -> None:
    """Raises `ConfigError` for more layers than there are tensors, before anything is built."""
    if count > len(tensors):
        raise ConfigError(
            f"config.json asks for {count:,} layers, but the weights have {len(tensors)} tensors"
        )
