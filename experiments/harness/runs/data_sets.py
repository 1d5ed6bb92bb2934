"""Data sets of the package `datasets`."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.harness.runs.text_cache import TextCache
from jaxformer import optional_dependencies
from jaxformer.errors import DataError


def data_set_identity(name: str, cache: TextCache) -> str:
    """The SHA-256 of all texts of a data set.

    Where its Arrow files are known by their content, the texts are not read again.
    """
    data_set = load_data_set(name)

    def digest() -> dict[str, str]:
        hashed = hashlib.sha256()
        for record in data_set:
            for path, text in _texts_in(record):
                hashed.update(f"{path}\0{text}\0".encode("utf-8", "surrogatepass"))
            hashed.update(b"\n")
        return {"digest": hashed.hexdigest()}

    files = [cache.digest(Path(file["filename"])) for file in data_set.cache_files]
    if not files:  # in memory
        return digest()["digest"]
    return cache.record(["data set", name, *files], digest)["digest"]


def _texts_in(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The dotted name of each text in a record, and the text."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts_in(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _texts_in(part, f"{path}.{number}")


def load_data_set(name: str) -> Any:
    """The data set `hf:NAME[:CONFIG][@SPLIT]`; the split is train by default."""
    library = optional_dependencies.load("datasets")
    path, _, split = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition(":")
    try:
        if any(Path(path, file).is_file() for file in ("state.json", "dataset_dict.json")):
            saved = library.load_from_disk(path)
            return saved[split or "train"] if isinstance(saved, dict) else saved
        return library.load_dataset(path, config or None, split=split or "train")
    except Exception as error:  # the library raises many classes
        raise DataError(
            f"{name} could not be loaded: {error}: check the name, the split and the network, or "
            "give a folder that holds the data set, as in hf:FOLDER@SPLIT"
        ) from error
