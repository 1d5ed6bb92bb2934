"""Records with fields of text: files of JSON lines and Parquet."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.runs.source_kinds import kind_of
from jaxformer import optional_dependencies
from jaxformer.errors import DataError, shorten
from jaxformer.text.data import iterate_lines


def read_fields(path: str | os.PathLike[str], fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The texts under `fields` of each record of a file, in order.

    A dotted name names a field, or leads into a record within the record, as in
    `translation.en`. Raises `DataError`, with the number of the record, where a field is absent or
    holds no text, and for a file that cannot be read.

    >>> _ = Path("pairs.jsonl").write_text('{"en": "A house.", "de": "Ein Haus.", "id": 7}')
    >>> list(read_fields("pairs.jsonl", ["en", "de"]))
    [('A house.', 'Ein Haus.')]
    """
    path = Path(os.path.expanduser(path))
    records = _parquet(path, fields) if kind_of(path) == "parquet" else json_lines(path)
    number = 0
    for number, record in records:
        yield tuple(text_of(record, field, f"{path}:{number}") for field in fields)
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


def _parquet(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, Any]]:
    parquet = optional_dependencies.load("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        known = set(file.schema_arrow.names)
        columns = {field if field in known else field.split(".")[0] for field in fields} & known
        batches = file.iter_batches(columns=sorted(columns) or None)
        yield from enumerate((each for batch in batches for each in batch.to_pylist()), start=1)
    except (OSError, optional_dependencies.load("pyarrow").ArrowException) as error:
        raise DataError(f"{path}: cannot read the file: {error}") from error


def text_of(record: Any, field: str, where: str) -> str:
    """The text under the dotted name `field` of `record`, which an error calls `where`."""
    value = record
    is_column = isinstance(record, dict) and field in record  # also one whose name has dots
    names = [field] if is_column else field.split(".")
    for name in names:
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else shorten(repr(value))
            raise DataError(f"{where}: there is no field {field!r}, but {known or 'nothing'}")
        value = value[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {field!r} must hold text, got {shorten(repr(value))}")
    if not is_unicode(value):
        raise DataError(f"{where}: the field {field!r} holds half of a surrogate pair: correct it")
    return value


def is_unicode(text: str) -> bool:
    """Whether `text` can be written in UTF-8, which half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
