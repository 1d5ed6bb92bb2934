"""Records of JSON Lines and Parquet give their texts, or an error that says where."""

import gzip
import json

import pytest

from experiments.harness.runs.records import is_record_file, read_fields
from jaxformer.errors import DataError

ROWS = [
    {"id": 3, "translation": {"en": "a dog\u2028sees", "de": "ein Hund"}, "note": "x\ny"},
    {"id": 5, "translation": {"en": "", "de": "Käse"}, "note": "z"},
]
EXPECTED = [("a dog\u2028sees", "x\ny"), ("", "z")]


def written(path, rows=ROWS):
    lines = "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\r\n\n" for row in rows)
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow", reason="needs the extra data")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_bytes(lines.encode())
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_the_fields_of_each_record_are_read_in_order(tmp_path, name):
    path = written(tmp_path / name)
    assert is_record_file(path) and not is_record_file(tmp_path / "a.json")
    assert list(read_fields(path, ("translation.en", "note"))) == EXPECTED


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    "field, said",
    [
        ("text", "there is no field 'text', but"),
        ("translation.fr", "there is no field 'translation.fr', but en, de"),
        ("id", "the field 'id' must hold text, got 3"),
    ],
)
def test_a_field_that_is_no_text_is_named_with_its_record(tmp_path, name, field, said):
    path = written(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}:1: {said}"):
        list(read_fields(path, (field,)))


def test_what_is_no_record_is_named_with_its_line(tmp_path):
    path = written(tmp_path / "a.jsonl")
    path.write_bytes(path.read_bytes() + b'{"id": ')
    with pytest.raises(DataError, match="a.jsonl:5: not a line of JSON"):
        list(read_fields(path, ("note",)))
    path.write_text("\n")
    with pytest.raises(DataError, match="there are no records"):
        list(read_fields(path, ("note",)))
    pytest.importorskip("pyarrow", reason="needs the extra data")
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match="a.parquet: cannot read the file"):
        list(read_fields(tmp_path / "a.parquet", ("note",)))
