"""Text by a name: files of lines or records, data sets of a hub, your own functions.

a.txt                           lines or documents (.gz too)
a.tsv                           pairs: source<TAB>target
a.jsonl, a.parquet              records with fields; .ndjson and .gz too
hf:NAME[:CONFIG][@SPLIT]        a data set of the package `datasets`; NAME may be a folder
package.module:name             your own function without arguments
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.cli import import_by_name, is_import_name
from experiments.harness.runs.text_cache import TextCache
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.text.data import iterate_lines, read_tab_pairs

_JSON_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")
_TABLES = (".tsv", ".tsv.gz")


def is_record_file(path: str | os.PathLike[str]) -> bool:
    """Whether the name of a file says that it holds records."""
    return str(path).endswith((*_JSON_LINES, ".parquet"))


def is_file(name: str) -> bool:
    """Whether `name` is that of a file."""
    return not (name.startswith("hf:") or is_import_name(name))


def is_plain(name: str) -> bool:
    """Whether `name` is that of a file of lines or documents."""
    return is_file(name) and not is_record_file(name) and not name.endswith(_TABLES)


def read_texts(name: str, field: str) -> Iterator[str]:
    """The texts of `name`: its lines, or what its records have under `field`."""
    if is_plain(name):
        return iterate_lines(name)
    return (text for (text,) in _read(name, (field,)))


def read_both(name: str, fields: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Source and target texts of `name`, which holds pairs; `fields` are their names in a record.

    Raises `ConfigError` for a file of lines, `DataError` for what cannot be read.
    """
    source, target = zip(*iterate_both(name, fields), strict=True)
    return list(source), list(target)


def iterate_both(name: str, fields: tuple[str, str]) -> Iterator[tuple[str, ...]]:
    """The pairs of `read_both`, one after the other."""
    if is_plain(name):
        raise ConfigError(
            f"parallel text needs both files, but source={name!r} and target='' were given: only "
            ".tsv, .jsonl, .parquet, hf:NAME and package.module:name hold both"
        )
    if name.endswith(_TABLES):
        return zip(*read_tab_pairs(name), strict=True)
    return iter(_read(name, fields))


def identity(name: str, cache: TextCache) -> str:
    """A text that changes with the content of `name`; your own function is called for it."""
    if is_file(name):
        return cache.name_of(Path(name))
    if name.startswith("hf:"):
        return _hub_data_set(name)._fingerprint
    digest = hashlib.sha256()
    for item in _called(name):
        digest.update(repr(item).encode() + b"\0")
    return digest.hexdigest()


def read_fields(path: str | os.PathLike[str], fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The texts under `fields` of each record of a file, in order.

    A dotted name leads into a record within the record, as in `translation.en`. Raises `DataError`,
    with the number of the record, where a field is absent or holds no text, and for a file that
    cannot be read.

    >>> _ = Path("pairs.jsonl").write_text('{"en": "A house.", "de": "Ein Haus.", "id": 7}')
    >>> list(read_fields("pairs.jsonl", ["en", "de"]))
    [('A house.', 'Ein Haus.')]
    """
    path = Path(path)
    records = json_lines(path) if str(path).endswith(_JSON_LINES) else _parquet(path, fields)
    number = 0
    for number, record in records:
        yield tuple(_field_of(record, field, f"{path}:{number}") for field in fields)
    if number == 0:
        raise DataError(f"{path}: there are no records; give at least one")


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not blank, from 1, and the JSON value in it."""
    for number, line in enumerate(iterate_lines(path), start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not a line of JSON: {error}") from error


def _read(name: str, fields: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """The texts under `fields` of each record of `name`."""
    if name.startswith("hf:"):
        records = enumerate(_hub_data_set(name))
        return (tuple(_field_of(x, field, f"{name}:{i}") for field in fields) for i, x in records)
    return _called(name) if is_import_name(name) else read_fields(name, fields)


def _field_of(record: Any, field: str, where: str) -> str:
    """The text under the dotted name `field` of `record`, which an error calls `where`."""
    value = record
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else shorten(repr(value))
            raise DataError(f"{where}: there is no field {field!r}, but {known or 'nothing'}")
        value = value[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {field!r} must hold text, got {shorten(repr(value))}")
    return value


def _parquet(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    parquet = optional_dependencies.load("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        columns = {field.split(".")[0] for field in fields} & set(file.schema_arrow.names)
        batches = file.iter_batches(columns=sorted(columns) or None)
        yield from enumerate((each for batch in batches for each in batch.to_pylist()), start=1)
    except (OSError, optional_dependencies.load("pyarrow").ArrowException) as error:
        raise DataError(f"{path}: cannot read the file: {error}") from error


def _called(name: str) -> Iterator[tuple[str, ...]]:
    """The texts, or tuples of texts, that the function `name` yields."""
    for item in import_by_name(name, "data")():
        texts = tuple(item) if isinstance(item, tuple | list) else (item,)
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{name} must give texts or pairs of texts, got {item!r:.80}")
        yield texts


def _hub_data_set(name: str) -> Any:
    """The data set `hf:NAME[:CONFIG][@SPLIT]`; the split is train by default."""
    library = optional_dependencies.load("datasets")
    path, _, split = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition(":")
    try:
        return library.load_dataset(path, config or None, split=split or "train")
    except Exception as error:  # the library raises many classes
        raise DataError(
            f"{name} could not be loaded: {error}: check the name, the split and the network, or "
            "give a folder that holds the data set, as in hf:FOLDER@SPLIT"
        ) from error
