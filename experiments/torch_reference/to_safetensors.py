"""Converts pickled weights: `python -m experiments.torch_reference.to_safetensors --folder FOLDER`.

Reads FOLDER/pytorch_model.bin, or its parts, and writes FOLDER/model.safetensors.
"""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.harness import cli
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained.hf_folder import read_json

_WHOLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_RESULT = "model.safetensors"


@dataclass(frozen=True)
class SafetensorsOptions:
    """The folder to convert."""

    folder: str = ""
    """Folder with pytorch_model.bin or its parts; model.safetensors is written beside it."""


def main(options: SafetensorsOptions) -> None:
    """Writes the whole file or nothing.

    Tensors are read with `weights_only=True`, which runs no code. Raises `ConfigError` where there
    is nothing to convert or the file exists, `DataError` for a file that cannot be read or holds
    other things than tensors.
    """
    if not options.folder:
        raise ConfigError("no folder was given: give --folder FOLDER")
    folder = Path(options.folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: give one with {_WHOLE}")
    if (folder / _RESULT).exists():
        raise ConfigError(f"{folder / _RESULT} exists already: remove it to convert again")
    tensors: dict[str, Any] = {}
    for name in _parts(folder):
        tensors |= _read(folder / name)
    unfinished = folder / f"{_RESULT}.unfinished"
    optional_dependencies.load("safetensors.torch").save_file(
        tensors, unfinished, metadata={"format": "pt"}
    )
    os.replace(unfinished, folder / _RESULT)
    print(f"{folder / _RESULT}: {len(tensors)} tensors")


def _parts(folder: Path) -> list[str]:
    """The names of the files that hold the tensors."""
    if (folder / _WHOLE).exists():
        return [_WHOLE]
    if not (folder / _INDEX).exists():
        raise ConfigError(f"{folder} has neither {_WHOLE} nor {_INDEX}")
    files = read_json(folder / _INDEX).get("weight_map")
    names = sorted(map(str, files.values())) if isinstance(files, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise DataError(f"{folder / _INDEX}: weight_map must name files of this folder")
    return list(dict.fromkeys(names))


def _read(path: Path) -> dict[str, Any]:
    """The tensors of one file, each in memory of its own, as safetensors keeps them."""
    torch = optional_dependencies.load("torch")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{path}: not a file of tensors alone: {reason}") from error
    if not isinstance(tensors, dict) or not all(map(torch.is_tensor, tensors.values())):
        raise DataError(f"{path}: must hold tensors by name, and nothing else")
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


if __name__ == "__main__":
    cli.start(main, {"default": SafetensorsOptions()}, __doc__)
