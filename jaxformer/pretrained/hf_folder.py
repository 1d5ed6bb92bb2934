"""Folders of `transformers`, of which no file outside is read and no code is run."""

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError, MissingExtra, shorten
from jaxformer.pretrained.weight_map import Shape

_MIB = 2**20
_CHUNK = 2**16
_JSON_LIMIT = 16 * _MIB
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
            f"{name} is not a folder, and cannot be downloaded from the Hub: "
            f"{shorten(str(error), 300)}"
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
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: not a whole JSON file: {error}") from error
        if not isinstance(content, dict):
            raise DataError(f"{path}: must hold an object, got {type(content).__name__}")
        return content


class Tensors:
    """The tensors in the safetensors files of a folder; only the headers are read at first.

    Attribute: `shapes` of all tensors by name. Raises `DataError` for files that are damaged or do
    not fit together, and for a folder with weights that only torch can read.
    """

    def __init__(self, folder: HFFolder) -> None:
        self.shapes: dict[str, Shape] = {}
        self._tensors: dict[str, _Stored] = {}
        if folder.has(_WHOLE):
            self._open(folder.file(_WHOLE))
        elif folder.has(_INDEX):
            self._open_parts(folder)
        elif folder.has(_PICKLE):
            raise DataError(
                f"{folder.path} has {_PICKLE}, which can run code when it is read, and no "
                f"{_WHOLE}: read it by torch.load(.., weights_only=True), which runs no code, and "
                "write its tensors with safetensors.torch.save_file"
            )
        else:
            raise DataError(f"{folder.path} has neither {_WHOLE} nor {_INDEX}")

    def read(self, name: str, *, mapped: bool = False) -> Float[np.ndarray, "*shape"]:
        """The tensor `name` in the type in which it is stored.

        With `mapped` the array is a view of the file, of which only what is used is in memory.
        Raises `DataError` for another type than F16, BF16 and F32, and for numbers that are not
        finite.
        """
        file, path, start, kind = self._tensors[name]
        if kind not in _TYPES:
            raise DataError(f"{name} has the type {kind}, but only {', '.join(_TYPES)} are read")
        if mapped and np.prod(self.shapes[name]):
            dtype = np.dtype(_TYPES[kind])
            tensor: np.ndarray = np.memmap(path, dtype, "r", start, self.shapes[name])
        else:
            tensor = file.get_tensor(name)
        flat = tensor.reshape(-1)
        parts = (flat[i : i + _CHUNK] for i in range(0, flat.size, _CHUNK))
        if not all(np.isfinite(part).all() for part in parts):
            raise DataError(f"{name} holds numbers that are not finite: the weights are damaged")
        return tensor

    def _open_parts(self, folder: HFFolder) -> None:
        file_of = folder.json(_INDEX).get("weight_map")
        if not isinstance(file_of, dict) or not file_of:
            raise DataError(f"{folder.path / _INDEX}: weight_map must say where each tensor is")
        for file in file_of.values():
            if not isinstance(file, str) or not _BARE.fullmatch(file):
                raise DataError(
                    f"{folder.path / _INDEX}: {shorten(str(file))!r} is not the name of a "
                    "safetensors file in this folder"
                )
        for file in sorted(set(file_of.values())):
            self._open(folder.file(file))
        for name in self.shapes.keys() ^ file_of.keys():
            raise DataError(f"{folder.path}: {name} is in only one of the files and {_INDEX}")

    def _open(self, path: Path) -> None:
        """Reads the header of one file."""
        library = optional_dependencies.load("safetensors")
        try:
            file = library.safe_open(path, "numpy")
        except (library.SafetensorError, OSError) as error:
            raise DataError(f"{path}: not a whole safetensors file: {error}") from error
        with path.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size))
        for name in file.keys():
            part = file.get_slice(name)
            self.shapes[name] = tuple(part.get_shape())
            start = 8 + size + header[name]["data_offsets"][0]
            self._tensors[name] = _Stored(file, path, start, part.get_dtype())


class _Stored(NamedTuple):
    """The open file of a tensor, its path, the tensor's first byte in it, and its type."""

    file: Any
    path: Path
    start: int
    kind: str


def check_layers(count: int, tensors: Mapping[str, Shape]) -> None:
    """Raises `ConfigError` for more layers than there are tensors, before anything is built."""
    if count > len(tensors):
        raise ConfigError(
            f"config.json asks for {count:,} layers, but the weights have {len(tensors)} tensors"
        )
