"""The kind of a source of text, by its name."""

import json
import os
from pathlib import Path
from typing import Literal

from jaxformer.config import is_import_name
from jaxformer.errors import DataError
from jaxformer.text.data import iterate_lines

Kind = Literal["text", "ids", "table", "json lines", "parquet", "data set", "function"]

_ENDINGS: dict[str, Kind] = {
    ".bin": "ids",
    ".npy": "ids",
    ".json": "json lines",
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".parquet": "parquet",
    ".tsv": "table",
}

_COLUMNS = "columns with commas between them"
_HELD: dict[Kind, str] = {
    "ids": "ids",
    "table": "columns with tabs between them",
    "json lines": "records",
    "parquet": "records",
}
_WITH_FIELDS: tuple[Kind, ...] = ("json lines", "parquet", "data set")


def kind_of(name: str | os.PathLike[str]) -> Kind:
    """The source that `name` stands for; a file that is there may look like another name.

    Raises `DataError` for a .json file that has not one record in each line, and for a .csv file,
    whose columns nothing here takes apart.
    """
    path = Path(os.path.expanduser(name))
    if _ending(path) == ".csv" and path.is_file():
        raise DataError(
            f"{path}: a .csv file holds {_COLUMNS}, which would be read as text: write texts into "
            "a .txt file, pairs into a .tsv file or records into a .jsonl file, or give the "
            "folder of .csv files as hf:FOLDER and the name of the column as its field"
        )
    if _ending(path) == ".json" and path.is_file():
        _check_record_lines(path)
    return unread_kind_of(name)


def unread_kind_of(name: str | os.PathLike[str]) -> Kind:
    """The source that `name` stands for, of which nothing is read."""
    name = os.path.expanduser(name)
    is_there = os.path.isfile(name)
    if not is_there and name.startswith("hf:"):
        return "data set"
    if not is_there and is_import_name(name):
        return "function"
    return _ENDINGS.get(_ending(Path(name)), "text")


def content_beside_lines(name: str) -> str:
    """The content that the name of a file stands for, where it is not lines of text; else ""."""
    return _COLUMNS if _ending(Path(name)) == ".csv" else _HELD.get(unread_kind_of(name), "")


def has_fields(name: str) -> bool:
    """Whether the source `name` is records, whose fields have names."""
    return unread_kind_of(name) in _WITH_FIELDS


def _ending(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _check_record_lines(path: Path) -> None:
    first = next((line for line in iterate_lines(path) if line.strip()), "")
    try:
        is_record = isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        is_record = False
    if not is_record:
        raise DataError(
            f"{path}: a .json file must have one record, {{...}}, in each line: write it so, or "
            "give its text in a .txt file"
        )
