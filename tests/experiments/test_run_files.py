"""Records of a run are read as they were written, or refused."""

import json
from pathlib import Path

import pytest

from experiments.harness.runs.text_cache import TextCache
from experiments.translation import evaluate
from jaxformer.errors import ConfigError, DataError
from jaxformer.pretrained.run_weights import select_weights, weights_of
from jaxformer.records import Record
from jaxformer.text.data import write_tokens
from tests.faults import states

FIELDS = {"steps": list, "score": float}


@pytest.fixture
def record(tmp_path) -> Record:
    record = Record(tmp_path / "note.json", "ask the author")
    record.write({"steps": [3, 5], "score": 7.25})
    return record


def test_a_record_is_read_as_it_was_written_and_changed(record):
    assert record.read(**FIELDS) == {"steps": [3, 5], "score": 7.25}
    record.update(score=1.5, name="a")
    assert record.read() == {"steps": [3, 5], "score": 1.5, "name": "a"}
    assert Record(record.path.with_name("absent.json")).read(**FIELDS) == {}
    record.path.write_text('{"steps": [3], "score": 1.5}')  # without a checksum
    assert record.read(**FIELDS) == {"steps": [3], "score": 1.5}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[3]",
        b"\xff",
        b"[" * 100_000,
        b'{"steps": [3]}',
        b'{"steps": 3, "score": 1.5}',
        b'{"steps": [3], "score": 1.5, "crc32": "00000000"}',
    ],
)
def test_what_is_no_record_is_refused_with_its_name_and_what_to_do(record, content):
    record.path.write_bytes(content)
    with pytest.raises(DataError, match="note.json"):
        record.read(**FIELDS)


def test_one_changed_digit_in_a_record_is_noticed(record):
    record.path.write_text(record.path.read_text().replace("5", "4", 1))
    with pytest.raises(DataError, match=str(record.path)):
        record.read()
    assert record.read_if_intact() == {}


def test_a_command_refuses_to_write_over_a_file_that_it_reads(tmp_path):
    test, link = str(tmp_path / "test.txt"), str(tmp_path / "link.txt")
    Path(test).write_text("precious")
    Path(link).symlink_to(test)
    options = evaluate.EvaluateOptions(source=link, target=test, output=link)
    with pytest.raises(ConfigError, match="link.txt"):
        evaluate.main(options)


def test_one_flipped_bit_in_a_token_file_is_noticed(tmp_path):
    path = tmp_path / "a.tokens"
    write_tokens(path, [[3, 5], [2]], vocab_size=11)
    assert [list(row) for row in TextCache().whole_tokens(path)] == [[3, 5], [2]]
    content = bytearray(path.read_bytes())
    content[64] ^= 1  # the first id
    path.write_bytes(content)
    with pytest.raises(DataError, match="a.tokens"):
        TextCache().whole_tokens(path)


def test_a_damaged_choice_of_weights_is_refused_and_not_replaced_by_the_newest(tmp_path):
    states.make_folder(tmp_path / "checkpoints", (3, 5))
    weights_of(tmp_path).write({"steps": [3], "tree": "params", "validation_bleu": 7.0})
    found = select_weights(tmp_path).read()
    assert states.as_bytes(found) == states.as_bytes(states.make_state(3)["params"])
    note = json.loads((tmp_path / "weights.json").read_text()) | {"steps": [5]}
    (tmp_path / "weights.json").write_text(json.dumps(note))
    with pytest.raises(DataError, match="weights.json"):
        select_weights(tmp_path)
