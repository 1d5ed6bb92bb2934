"""Files of records: JSON Lines and Parquet, read one record after the other."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxformer import optional_dependencies
from jaxformer.errors import DataError, shorten
from jaxformer.text.data.text_files import raw_lines

_JSON_LINES = (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz")


def is_record_file(path: str | os.PathLike[str]) -> bool:
    """Whether the name of a file says that it holds records: .jsonl, .ndjson (.gz) or .parquet.

    >>> [is_record_file(name) for name in ("pairs.jsonl.gz", "pairs.tsv")]
    [True, False]
    """
    return str(path).endswith((*_JSON_LINES, ".parquet"))


def read_fields(path: str | os.PathLike[str], fields: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The texts under `fields` of each record of a .jsonl (.gz too) or .parquet file, in order.

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
        yield tuple(field_of(record, field, f"{path}:{number}") for field in fields)
    if number == 0:
        raise DataError(f"{path}: there are no records; give at least one")


def field_of(record: Any, field: str, where: str) -> str:
    """The text under the dotted name `field` of `record`, which an error calls `where`.

    >>> field_of({"translation": {"en": "A house."}}, "translation.en", "record 1")
    'A house.'
    """
    value = record
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(map(str, value)) if isinstance(value, dict) else shorten(repr(value))
            raise DataError(f"{where}: there is no field {field!r}, but {known or 'nothing'}")
        value = value[name]
    if not isinstance(value, str):
        raise DataError(f"{where}: the field {field!r} must hold text, got {shorten(repr(value))}")
    return value


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not blank, from 1, and the JSON value in it."""
    for number, line in enumerate(raw_lines(path), start=1):
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
        columns = {field.split(".")[0] for field in fields}
        batches = file.iter_batches(columns=sorted(columns & known) or None)
        records = (record for batch in batches for record in batch.to_pylist())
        yield from enumerate(records, start=1)
    except (OSError, optional_dependencies.load("pyarrow").ArrowException) as error:
        raise DataError(f"{path}: cannot read the file: {error}") from error
