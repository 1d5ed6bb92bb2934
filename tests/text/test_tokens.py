"""Text files to lines, lines to ids on disk."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.errors import ConfigError, DataError
from jaxformer.text import data
from jaxformer.text.data import Tokens
from jaxformer.text.tokenizers import Tokenizer, train_bpe
from tests.text.examples import examples

BOM = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """One id a byte, and one for the space before the sentence."""
    return train_bpe(["a"], 260)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


# Reading


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\r\r\nb\rc\n", ["a\r", "b\rc"]),
        (b"\n", [""]),
        (b"\n\n a \n\n", ["", "", " a ", ""]),
        (BOM + b"a\nb\n", ["a", "b"]),
        (b"a\n" + BOM + b"b", ["a", "\ufeffb"]),
        ("a\u2028b\x85c\x0bd\x0ce\x1cf\ng\n".encode(), ["a\u2028b\x85c\x0bd\x0ce\x1cf", "g"]),
        (b"a\x00b\n", ["a\x00b"]),
        (b"x" * 1_000_003 + b"\ny", ["x" * 1_000_003, "y"]),
        ("ü🙂\n".encode(), ["ü🙂"]),
    ],
)
@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
def test_only_a_line_feed_ends_a_line(tmp_path, content, lines, suffix):
    path = tmp_path / f"text.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert data.read_lines(path) == lines


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent", None, "absent"),
        ("nul\x00", None, "cannot read the file"),
        ("empty", b"", "empty"),
        ("mark", BOM, "mark"),
        ("empty.gz", gzip.compress(b"", mtime=0), "empty.gz"),
        ("cut.gz", gzip.compress(b"ab\n" * 101, mtime=0)[:-9], "cut.gz"),
        ("plain.gz", b"text\n", "plain.gz"),
        (
            "hurt.gz",
            gzip.compress(b"text\n", mtime=0)[:10] + b"\xff" * 20,
            "hurt.gz",
        ),
        ("latin", b"a\nb\ngr\xfc\xdfe\n", "latin:3: byte 3 of the line .0xfc. is not UTF-8"),
        ("utf16", "sun moon".encode("utf-16-le"), "utf16:1: a third of the line's bytes are 0"),
        ("first", b"\xff\xfea\x00", "first:1: byte 1 of the line .0xff."),
        ("surrogate", b"a\n\xed\xa0\x80\n", "surrogate:2: byte 1 of the line"),
        ("edge", b"a\n" + b"x" * 8191 + b"\xc3", "edge:2: byte 8192 of the line .0xc3."),
    ],
)
def test_a_bad_file_is_refused_by_name_and_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        data.read_lines(tmp_path / name)


def test_files_of_unequal_length_are_refused_with_both_counts(tmp_path):
    (tmp_path / "a.en").write_bytes(b"1\n2\n3\n")
    (tmp_path / "a.de").write_bytes(b"1\n2\n")
    with pytest.raises(DataError, match="a.en .*a.de"):
        data.read_pairs(tmp_path / "a.en", tmp_path / "a.de")
    assert data.read_pairs(tmp_path / "a.de", tmp_path / "a.de") == (["1", "2"], ["1", "2"])


def test_tab_pairs_are_the_first_two_columns(tmp_path):
    (tmp_path / "ok.txt").write_bytes("Go.\tGeh!\tCC-BY\r\n\tü\n".encode())
    (tmp_path / "bad.txt").write_bytes(b"a\tb\n\t\nno tab\n")
    assert list(data.iterate_tab_pairs(tmp_path / "ok.txt")) == [("Go.", "Geh!"), ("", "ü")]
    with pytest.raises(DataError, match="bad.txt:3: .*source<TAB>target"):
        list(data.iterate_tab_pairs(tmp_path / "bad.txt"))


def reference_pairs(source: bytes, target: bytes, longest: int) -> list[tuple[str, str]] | None:
    """The content to be kept, read in the plainest way; None where the files must be refused."""
    sides = []
    for content in (source, target):
        rows = content.removeprefix(BOM).split(b"\n")
        sides.append(rows if rows[-1] else rows[:-1])
    if len(sides[0]) != len(sides[1]):
        return None
    try:
        pairs = [
            tuple(side.decode().removesuffix("\r") for side in p) for p in zip(*sides, strict=True)
        ]
    except UnicodeDecodeError:
        return None
    fits = [p for p in pairs if max(len(side.encode()) for side in p) + 2 <= longest]
    return [p for p in fits if p[0].strip() and p[1].strip()] or None


PIECES = [b"\n", b"\r\n", b"\r", b" ", b"\t", BOM, b"\x00", b"<pad>", b"a bc", b"d" * 30]
PIECES += [piece.encode() for piece in ("\u2028", "\x85", "\x0b", "ü", "🙂")]
GOOD_SIDE = st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join)
ANY_SIDE = st.one_of(GOOD_SIDE, st.binary(max_size=40))


@st.composite
def aligned_files(draw) -> tuple[bytes, bytes]:
    """Two files with equally many lines."""
    line = st.one_of(st.sampled_from(PIECES), GOOD_SIDE).map(lambda x: x.replace(b"\n", b""))
    pairs = draw(st.lists(st.tuples(line, line), min_size=1, max_size=7))
    source, target = (b"\n".join(side) + b"\n" for side in zip(*pairs, strict=True))
    return source, target


@examples
@given(files=st.one_of(aligned_files(), st.tuples(ANY_SIDE, ANY_SIDE)))
def test_the_pairs_kept_from_any_files_are_those_of_a_plain_reader(files, folder, byte_tokenizer):
    for name, content in zip(("source", "target"), files, strict=True):
        (folder / name).write_bytes(content)
    try:
        lines = data.read_pairs(folder / "source", folder / "target")
        sides = data.encode_pairs(*lines, byte_tokenizer, folder)
        batches = data.bucket_pairs(*sides, seed=1, batch_tokens=64, buckets=2, max_len=41)
    except DataError:
        kept = None
    else:
        steps = [batches.batch(step) for step in range(batches.steps_per_epoch)]
        rows = [pair for step in steps for pair in zip(step.source, step.target, strict=True)]
        text = [byte_tokenizer.decode_batch(pair) for pair in rows if pair[0].any()]
        kept = sorted(map(tuple, text))
    expected = reference_pairs(*files, longest=41)
    assert kept == (expected and sorted(expected))


# Tokens


@pytest.mark.parametrize(("vocab_size", "width"), [(97, 2), (65_536, 2), (65_537, 4)])
def test_tokens_come_back_from_disk_as_written(tmp_path, vocab_size, width):
    rows = [[5, 96, 7], [], [vocab_size - 1], [0, 1, 2, 3, 4]]
    written = data.write_tokens(tmp_path / "a.tokens", iter(rows), vocab_size=vocab_size)
    opened = data.open_tokens(tmp_path / "a.tokens")
    for tokens in (written, opened, Tokens.from_lists(rows)):
        assert [row.tolist() for row in tokens] == rows
        assert tokens.lengths.tolist() == [3, 0, 1, 5] and len(tokens) == 4
        assert tokens[1].dtype == tokens[0].dtype == np.int32
        assert tokens.fingerprint == opened.fingerprint
    assert opened.ids.dtype.itemsize == width
    assert [path.name for path in tmp_path.iterdir()] == ["a.tokens"]


def test_the_fingerprint_of_tokens_sees_ids_and_borders():
    prints = [
        Tokens.from_lists(x).fingerprint for x in ([[5, 6], [7]], [[5], [6, 7]], [[5, 6], [8]])
    ]
    assert len(set(prints)) == 3


def test_a_file_carries_its_fingerprint_and_is_not_read_through_for_it(tmp_path):
    written = data.write_tokens(tmp_path / "a.tokens", [[5, 6], [7]], vocab_size=11)
    content = bytearray((tmp_path / "a.tokens").read_bytes())
    content[64] = 8
    (tmp_path / "b.tokens").write_bytes(content)
    opened = data.open_tokens(tmp_path / "b.tokens")
    assert [row.tolist() for row in opened] == [[8, 6], [7]]
    assert opened.fingerprint == written.fingerprint
    assert opened.fingerprint != Tokens(opened.ids, opened.offsets).fingerprint


def test_a_file_for_a_larger_vocabulary_than_the_models_is_refused_when_it_is_opened(tmp_path):
    data.write_tokens(tmp_path / "a.tokens", [[5, 6], [7]], vocab_size=11)
    assert data.open_tokens(tmp_path / "a.tokens", vocab_size=11).vocab_size == 11
    with pytest.raises(DataError, match="a.tokens .*vocab_size=7"):
        data.open_tokens(tmp_path / "a.tokens", vocab_size=7)


@pytest.mark.parametrize("ids", [[3, -1, 5], [0.5, 2.0]])
@pytest.mark.usefixtures("misuse")
def test_tokens_of_an_array_with_other_than_ids_are_refused(ids):
    with pytest.raises(DataError, match="(int64, -1|float64)"):
        Tokens(np.array(ids), np.array([0, len(ids)]))


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("id", [-1, 13])
def test_a_batch_of_own_arrays_with_an_id_outside_the_vocabulary_is_refused(side, id):
    sides = {"source": np.full((2, 5), 3), "target": np.full((2, 7), 3)}
    batch = data.PairBatch.create(**sides, vocab_size=13)
    assert batch.example_ids.tolist() == [0, 1]
    sides[side][1, 2] = id
    with pytest.raises(DataError, match=f"{side} .*id {id}, "):
        data.PairBatch.create(**sides, vocab_size=13)


def test_a_batch_of_own_full_rows_counts_every_label():
    batch = data.StreamBatch.create(np.full((3, 8), 5), vocab_size=7)
    assert batch.loss_mask.shape == (3, 7) and batch.loss_mask.all()
    with pytest.raises(DataError, match="id 5, "):
        data.StreamBatch.create(np.full((3, 8), 5), vocab_size=5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([4, 97], "sequence 1: ids must be 0 to 96, got 4 to 97"),
        ([-1], "sequence 1: ids must be 0 to 96, got -1 to -1"),
        ([1.5], "sequence 1"),
        ([[1], [2]], "sequence 1"),
    ],
)
def test_ids_that_do_not_fit_are_refused_and_leave_no_file(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        data.write_tokens(tmp_path / "a.tokens", [[5], row], vocab_size=97)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="sequence 1"):
        Tokens.from_lists([[5], [2**32 if row == [4, 97] else row[0]]])


def test_of_two_writers_of_one_file_each_writes_its_own_and_the_last_one_wins(tmp_path):
    path = tmp_path / "a.tokens"

    def sequences():
        yield [5]
        other = data.write_tokens(path, [[6, 7]], vocab_size=9)
        assert other[0].tolist() == [6, 7]
        yield [8]

    found = data.write_tokens(path, sequences(), vocab_size=9)
    assert [row.tolist() for row in found] == [[5], [8]]
    assert [file.name for file in tmp_path.iterdir()] == ["a.tokens"]


def test_a_vocabulary_of_no_size_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size"):
        data.write_tokens(tmp_path / "a.tokens", [[5]], vocab_size=0)


def test_an_id_that_a_batch_cannot_hold_is_refused_and_not_negative(tmp_path):
    with pytest.raises(DataError, match="2147483648"):
        Tokens.from_lists([[1 << 31]])
    with pytest.raises(ConfigError, match="vocab_size"):
        data.write_tokens(tmp_path / "a.tokens", [[5]], vocab_size=(1 << 31) + 1)
    tokens = Tokens(np.array([5, 1 << 31], np.uint32), np.array([0, 1, 2]))
    assert tokens[0].tolist() == [5]
    for read in (lambda: tokens[1], lambda: tokens.take(np.array([0, 1]))):
        with pytest.raises(DataError, match="2147483648"):
            read()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_file_that_grows_while_it_is_read_is_refused_with_both_sizes(tmp_path, name):
    path, content = tmp_path / name, b"sun\nmoon\n" * 20_011
    path.write_bytes(gzip.compress(content, 0, mtime=0) if name.endswith("gz") else content)
    lines, size = data.iterate_lines(path), path.stat().st_size
    assert next(lines) == "sun"
    with path.open("ab") as file:
        file.write(gzip.compress(b"fog\n", mtime=0) if name.endswith("gz") else b"fog\n")
    with pytest.raises(DataError, match=f"{name}: .* {size:,} "):
        list(lines)
    assert data.read_lines(path)[-1] == "fog"


def test_a_token_file_cut_anywhere_is_refused_by_name(tmp_path):
    path = tmp_path / "a.tokens"
    data.write_tokens(path, [[5, 6, 7], [8]], vocab_size=11)
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(DataError, match="a.tokens: "):
            data.open_tokens(path)
    with pytest.raises(DataError, match="absent"):
        data.open_tokens(tmp_path / "absent")


@pytest.mark.parametrize(
    "place", [0, 16, 20, 24, 32, pytest.param(-56, id="first"), pytest.param(-40, id="last")]
)
def test_a_token_file_damaged_in_header_or_offsets_is_refused(tmp_path, place):
    path = tmp_path / "a.tokens"
    data.write_tokens(path, [[5, 6, 7], [8]], vocab_size=11)
    content = bytearray(path.read_bytes())
    content[place] ^= 0x07
    path.write_bytes(content)
    with pytest.raises(DataError, match="a.tokens: "):
        data.open_tokens(path)


def test_offsets_must_not_decrease():
    with pytest.raises(DataError, match="offsets"):
        Tokens(np.arange(5), np.array([0, 4, 3, 5]))


def test_a_sequence_that_is_not_there_is_an_index_error():
    with pytest.raises(IndexError, match="sequence 2"):
        Tokens.from_lists([[5], [6]])[2]


def test_encode_pairs_keeps_every_line_and_may_use_two_vocabularies(tmp_path, byte_tokenizer):
    other = train_bpe(["der Hund"] * 3, 265)
    lines = ["a", " \t", "", "b <pad>"], ["der Hund", "x", "y", ""]
    source, target = data.encode_pairs(*lines, byte_tokenizer, tmp_path, target_tokenizer=other)
    assert byte_tokenizer.decode_batch(source) == ["a", "", "", "b <pad>"]
    assert target[0].tolist() == other.encode("der Hund") != byte_tokenizer.encode("der Hund")
    assert other.decode_batch(target) == lines[1]
    assert data.open_tokens(tmp_path / "source.tokens").lengths.tolist() == [2, 0, 0, 8]
    with pytest.raises(DataError, match="2 source lines and 1 target lines"):
        data.encode_pairs(["a", "b"], ["c"], byte_tokenizer, tmp_path)


@pytest.mark.parametrize("wrong", [101, -1, 2**63 + 5])
def test_the_first_sequence_with_a_wrong_id_is_named_wherever_it_is(wrong, tmp_path):
    rows: list = [[number % 101] * (number % 7) for number in range(5003)]
    path = tmp_path / "x.tokens"
    assert data.write_tokens(path, rows, vocab_size=101)[4987].tolist() == rows[4987]
    rows[4987] = np.array([3, wrong], np.uint64 if wrong > 101 else np.int64)
    rows[4990] = [102]
    with pytest.raises(DataError, match=f"sequence 4987: .*got {min(3, wrong)} to {max(3, wrong)}"):
        data.write_tokens(path, rows, vocab_size=101)
    with pytest.raises(DataError, match="sequence 4987: "):
        data.Tokens.from_lists(rows, vocab_size=101)
