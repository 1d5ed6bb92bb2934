"""Pickled weights as safetensors: `python -m experiments.pytorch_twin.to_safetensors FOLDER`.

Reads FOLDER/pytorch_model.bin, or its parts, and writes FOLDER/model.safetensors beside it.
"""

import argparse
import os
import pickle
import sys
from pathlib import Path
from typing import Any

from experiments import commands
from jaxformer import extras
from jaxformer.config import ConfigError
from jaxformer.data import DataError
from jaxformer.pretrained.files import Folder

_WHOLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_RESULT = "model.safetensors"


def main(folder: Path) -> None:
    """Writes the file whole or not at all.

    Tensors are read with `weights_only=True`, which builds nothing else. Raises `ConfigError`
    where there is nothing to convert or it is done already, `DataError` for a file that holds
    other things than tensors or cannot be read.
    """
    source = Folder(folder)
    if source.has(_RESULT):
        raise ConfigError(f"{folder / _RESULT} is there already")
    tensors: dict[str, Any] = {}
    for name in _parts(source):
        tensors |= _read(source.file(name))
    unfinished = folder / f"{_RESULT}.unfinished"
    extras.load("safetensors.torch").save_file(tensors, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, folder / _RESULT)
    print(f"{folder / _RESULT}: {len(tensors)} tensors")


def _parts(source: Folder) -> list[str]:
    """The names of the files that hold the tensors."""
    if source.has(_WHOLE):
        return [_WHOLE]
    if not source.has(_INDEX):
        raise ConfigError(f"{source.path} has neither {_WHOLE} nor {_INDEX}")
    places = source.json(_INDEX).get("weight_map")
    names = sorted(map(str, places.values())) if isinstance(places, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise DataError(f"{source.path / _INDEX}: weight_map must name files of this folder")
    return list(dict.fromkeys(names))


def _read(path: Path) -> dict[str, Any]:
    """The tensors of one file, each in memory of its own, as safetensors keeps them."""
    torch = extras.load("torch")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{path}: not a file of tensors alone: {reason}") from error
    if not isinstance(found, dict) or not all(map(torch.is_tensor, found.values())):
        raise DataError(f"{path}: must hold tensors by name, and nothing else")
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def parse(args: list[str] | None = None) -> Path:
    """The folder on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.pytorch_twin.to_safetensors", description=__doc__
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    return parser.parse_args(args).folder


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(parse())))
