"""The files of a model as `transformers` writes them; no code in them is run."""

import difflib
import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError, MissingExtra, shorten
from jaxformer.pretrained.weight_map import Shape
from jaxformer.storage import is_in_bucket, read_json, to_path

_CHUNK = 2**16
_MOST_FOLDERS = 500
_TYPES = {"F16": np.float16, "BF16": jnp.bfloat16, "F32": np.float32}
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB = "hf:"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TRAININGS = {
    "translation": "experiments.translation.train",
    "language_modelling": "experiments.language_modelling.train",
    "finetuning": "experiments.language_modelling.finetune",
}
"""The commands that make runs, by the folder of an experiment, RUNS/EXPERIMENT/NAME."""
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.spm", "*.model"]


# The endings of files of weights and vocabularies that are not read, and what to do with them.
_FOREIGN_FILES = {
    ".gguf": (
        "weights of llama.cpp, which transformers writes as a folder: "
        "AutoModelForCausalLM.from_pretrained(folder, gguf_file='{name}').save_pretrained(new), "
        "and the same of AutoTokenizer"
    ),
    ".onnx": (
        "a compiled graph, whose weights have lost their names: take the folder of transformers "
        "that it was exported from"
    ),
    ".h5": (
        "weights of TensorFlow, which transformers 4 writes as a folder: "
        "AutoModel.from_pretrained(folder, from_tf=True).save_pretrained(new)"
    ),
    ".msgpack": (
        "weights of Flax, which transformers 4 writes as a folder: "
        "AutoModel.from_pretrained(folder, from_flax=True).save_pretrained(new)"
    ),
    ".tiktoken": (
        "a vocabulary of tiktoken, which transformers writes as a tokenizer.json: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    ),
}


def foreign_files(folder: Path) -> str:
    """A sentence about the files in `folder` of other programs, one of each kind; "" for none."""
    sentences = []
    for ending, cure in _FOREIGN_FILES.items():
        names = sorted(path.name for path in folder.glob(f"*{ending}"))
        if names:
            sentences.append(f"{names[0]} is {cure.format(name=names[0])}")
    return "; ".join(sentences)


def locate(name: str | os.PathLike[str]) -> Path:
    """The folder `name`; for "hf:owner/model", the hub's model of this name, downloaded.

    Raises `MissingExtra` for a hub's name without `huggingface_hub`, `ConfigError` for what is no
    folder, naming the nearest folders of models, and for a name that the hub does not have.
    """
    if isinstance(name, str) and name.startswith(_HUB):
        return _download(name.removeprefix(_HUB))
    path = to_path(name)
    if path.is_dir():
        return path
    near = [] if is_in_bucket(path) or path.exists() else _folders_near(path)
    asked = isinstance(name, str) and _HUB_NAME.fullmatch(name) and "/" in name
    raise ConfigError(
        f"{path} is not a folder: give one with a config.json"
        + (f", such as {', '.join(near)}" if near else "")
        + (f", or for the hub's model {_HUB}{name}" if asked else "")
        + _how_to_train(path)
    )


def _how_to_train(path: Path) -> str:
    """The command that makes a run of the experiment that `path` names; "" for another path."""
    command = _TRAININGS.get(path.parent.name)
    return f"; a run is made there by python -m {command}" if command else ""


def _download(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{_HUB}{name} is not a name of the hub: give {_HUB}owner/model")
    try:
        library = optional_dependencies.load("huggingface_hub")
    except MissingExtra as error:
        raise MissingExtra(f"{_HUB}{name}: {error}") from error
    try:
        return Path(library.snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{_HUB}{name} cannot be downloaded: {shorten(str(error), 300)}"
        ) from error


def _folders_near(path: Path) -> list[str]:
    """The folders with a config.json that are named most like `path`, which is not there."""
    root = next(parent for parent in path.parents if parent.is_dir())
    if root.resolve() == root.resolve().parent:  # the root of all files
        return []
    patterns = ("/".join(["*"] * depth) + "/config.json" for depth in (1, 2, 3))
    files = (file for pattern in patterns for file in root.glob(pattern))
    folders = [str(file.parent) for file in islice(files, _MOST_FOLDERS)]
    return difflib.get_close_matches(str(path), folders, n=3, cutoff=0.0)


_TORCH_CURE = (
    "a pytorch_model.bin can run code when it is read; load it with torch.load(.., "
    "weights_only=True), which runs none, and write its tensors with safetensors.torch.save_file"
)


class _Stored(NamedTuple):
    path: Path
    start: int
    """The tensor's first byte in the file."""
    kind: str


class Tensors:
    """The tensors in the safetensors files of a folder; only the headers are read at first.

    They are in the file `whole`, or in those that an index lists. Attribute: `shapes` of all
    tensors by name. Raises `DataError` for files that are damaged or do not fit together, and for a
    folder with weights that only other programs can read.
    """

    def __init__(self, folder: Path, whole: str = _WHOLE) -> None:
        self.shapes: dict[str, Shape] = {}
        self._tensors: dict[str, _Stored] = {}
        if (folder / whole).exists():
            self._open(folder / whole)
        elif (folder / _INDEX).exists():
            self._open_parts(folder)
        else:
            cure = _TORCH_CURE
            if not any(folder.glob("pytorch_model*.bin")):
                cure = foreign_files(folder) or _TORCH_CURE
            raise DataError(f"{folder} has neither {whole} nor {_INDEX}: {cure}")

    def read(self, name: str) -> Float[np.ndarray, "*shape"]:
        """The tensor `name` in the type in which it is stored, as a view of the file.

        Raises `DataError` for another type than F16, BF16 and F32, and for numbers that are not
        finite.
        """
        path, start, kind = self._tensors[name]
        if kind not in _TYPES:
            raise DataError(f"{name} has the type {kind}, but only {', '.join(_TYPES)} are read")
        tensor = np.memmap(path, np.dtype(_TYPES[kind]), "r", start, self.shapes[name])
        flat = tensor.reshape(-1)
        parts = (flat[i : i + _CHUNK] for i in range(0, flat.size, _CHUNK))
        if not all(np.isfinite(part).all() for part in parts):
            raise DataError(f"{name} holds numbers that are not finite: the weights are damaged")
        return tensor

    def _open_parts(self, folder: Path) -> None:
        files = read_json(folder / _INDEX).get("weight_map")
        files = files if isinstance(files, dict) else {}
        names = files.values()
        if not names or any(not isinstance(x, str) or Path(x).name != x for x in names):
            raise DataError(f"{folder / _INDEX}: weight_map must name the file of each tensor")
        for name in sorted(set(names)):
            self._open(folder / name)
        for name in self.shapes.keys() ^ files.keys():
            raise DataError(f"{folder}: {name} is in only one of the files and {_INDEX}")

    def _open(self, path: Path) -> None:
        """Reads the header of one file."""
        library = optional_dependencies.load("safetensors")
        try:
            library.safe_open(path, "numpy")  # checks that the header fits the file
            with path.open("rb") as content:
                size = int.from_bytes(content.read(8), "little")
                header = json.loads(content.read(size))
        except (library.SafetensorError, OSError) as error:
            raise DataError(f"{path}: not a whole safetensors file: {error}") from error
        for name in header.keys() - {"__metadata__"}:
            facts = header[name]
            self.shapes[name] = tuple(facts["shape"])
            start = 8 + size + facts["data_offsets"][0]
            self._tensors[name] = _Stored(path, start, facts["dtype"])
