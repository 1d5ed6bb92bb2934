"""Text files of any size to documents in blocks, and these to ids."""

import gzip
import re
import tracemalloc
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxformer.errors import ConfigError, DataError
from jaxformer.text import data
from jaxformer.text.data import encoding, text_files
from jaxformer.text.tokenizers import Tokenizer, train_bpe, train_characters
from tests.text.examples import examples

BOM = b"\xef\xbb\xbf"
SPLITS = ["file", "line", "blank_line"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE that puts nothing in front of a text."""
    text = ["def f(x):\n    return x  # ü\n\n\nclass A:\n    pass\n"] * 7
    return train_bpe(text, 331, prefix="")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("documents")


def read(*paths: Path, split: str) -> list[str]:
    return ["".join(blocks) for blocks in data.read_documents(paths, split=split)]


# Reading


@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("file", ["\n \n  one\r\ntwo\n\r\n \n\t three \u2028 \n"]),
        ("line", ["  one", "two", "\t three \u2028 "]),
        ("blank_line", ["  one\r\ntwo", "\t three \u2028 "]),
    ],
)
def test_a_document_is_a_file_a_line_or_what_stands_between_blank_lines(
    tmp_path, split, expected, suffix
):
    content = BOM + "\n \n  one\r\ntwo\n\r\n \n\t three \u2028 \n".encode()
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    blank = tmp_path / "blank.txt"
    blank.write_bytes(b" \n\n")
    assert read(path, blank, path, split=split) == expected * 2


def plain(content: bytes, split: str) -> list[str]:
    """The documents of a file, read in the plainest way."""
    text = content.removeprefix(BOM).decode()
    if split == "file":
        return [text] if text.strip() else []
    rows = text.split("\n")
    if split == "line":
        rows = [row.removesuffix("\r") for row in rows]
        return [row for row in rows if row.strip()]
    found, current = [], []
    for row in [*rows, ""]:
        if row.strip():
            current.append(row)
        elif current:
            found.append("\n".join(current).removesuffix("\r"))
            current = []
    return found


PIECES = [b"\n", b"\n\n", b"\r\n", b"\r", b" ", b"\t", BOM, b"<pad>", b"a bc", b"d" * 30]
PIECES += [piece.encode() for piece in ("\u2028", "\x85", "\x0b", "ü", "🙂")]
CONTENT = st.lists(st.sampled_from(PIECES), max_size=17).map(b"".join)


def set_block_size(patch, size):
    patch.setattr(text_files, "BLOCK_LENGTH", size)


@examples
@given(content=CONTENT, split=st.sampled_from(SPLITS), block=st.integers(1, 13))
def test_the_documents_of_any_file_are_those_of_a_plain_reader(content, split, block, folder):
    path = folder / "any.txt"
    path.write_bytes(content)
    expected = plain(content, split)
    with pytest.MonkeyPatch.context() as patch:
        set_block_size(patch, block)
        if expected:
            assert read(path, split=split) == expected
        else:
            with pytest.raises(DataError, match="there is no text"):
                read(path, split=split)


@pytest.mark.parametrize("split", SPLITS)
def test_documents_not_taken_are_passed_over(tmp_path, monkeypatch, split):
    set_block_size(monkeypatch, 2)
    (tmp_path / "a").write_bytes(b"one 1\n\ntwo 2\n\nthree 3")
    (tmp_path / "b").write_bytes(b"four 4")
    count = sum(1 for _ in data.read_documents([tmp_path / "a", tmp_path / "b"], split=split))
    assert count == (2 if split == "file" else 4)


def test_blocks_are_of_about_128_kilobytes_and_the_file_is_never_held(tmp_path):
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        for _ in range(3):
            file.write(b"x = 1\n    y = 2\n" * 65_537)
    tracemalloc.start()
    sizes = [len(x) for x in chain.from_iterable(data.read_documents([path], split="file"))]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == path.stat().st_size == 3 * 16 * 65_537
    assert min(sizes[:-1]) > 64 << 10 and max(sizes) < 192 << 10
    assert peak < 2 << 20


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("content", [b"", BOM, b" \n \r\n"])
def test_a_file_without_text_is_refused(tmp_path, content, split):
    (tmp_path / "blank").write_bytes(content)
    with pytest.raises(DataError, match="blank: "):
        read(tmp_path / "blank", split=split)


def test_a_folder_no_files_and_an_unknown_split_are_refused(tmp_path):
    with pytest.raises(DataError, match=f"{tmp_path.name}: "):
        read(tmp_path, split="file")
    with pytest.raises(DataError, match="no files"):
        read(split="file")
    with pytest.raises(ConfigError, match="split.*'word'"):
        data.read_documents([], split="word")


# Encoding


CODE = [
    "def f(x):\n",
    "    return x",
    "\n",
    "\n\n",
    "class A:",
    " ",
    "  ",
    "ü",
    "🙂",
    "\t",
    "don't",
]


@examples
@given(text=st.lists(st.sampled_from(CODE), min_size=1, max_size=40).map("".join))
def test_ids_of_blocks_are_those_of_the_whole_wherever_a_block_can_end_well(
    text, tokenizer, folder
):
    assume(text.strip())
    path = folder / "code.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        set_block_size(patch, 11)
        (blocks,) = map(list, data.read_documents([path], split="file"))
    assert "".join(blocks) == text
    for before, after in zip(blocks, blocks[1:], strict=False):
        edge = before[-2:] + after[:1], before[-1:] + after[:2]
        well = re.fullmatch(r"\S\n\S", edge[0]) or re.fullmatch(r"\S \S", edge[1])
        assert well or not re.search(r"\S[\n ]\S", before)
        if not well:
            return
    assert list(chain.from_iterable(tokenizer.encode_batch(blocks))) == tokenizer.encode(text)


def test_documents_come_back_from_disk_with_their_ends(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(encoding, "_CHARACTERS_AT_ONCE", 7)
    texts = [["def f", "(x):\n"], [], ["class A:"], "    pass"]
    bare = data.encode_documents(texts, tokenizer, tmp_path / "bare", isolate_documents=False)
    expected = [[*tokenizer.encode("def f"), *tokenizer.encode("(x):\n")], []]
    expected += [tokenizer.encode("class A:"), tokenizer.encode("    pass")]
    assert [ids.tolist() for ids in bare] == expected
    apart = data.encode_documents(texts, tokenizer, tmp_path / "apart", isolate_documents=True)
    special = tokenizer.special
    assert [ids.tolist() for ids in apart] == [[special.bos, *x, special.eos] for x in expected]
    assert apart.vocab_size == tokenizer.vocab_size


def test_a_vocabulary_without_special_tokens_adds_none(tmp_path):
    characters = train_characters(["abc"], special_tokens=())
    tokens = data.encode_documents(["ab", "c"], characters, tmp_path / "a", isolate_documents=True)
    assert [ids.tolist() for ids in tokens] == [[0, 1], [2]]


def test_a_document_of_many_blocks_is_encoded_in_little_memory(tmp_path, tokenizer, monkeypatch):
    for name in ("_CHARACTERS_AT_ONCE", "_PART"):
        monkeypatch.setattr(encoding, name, 1 << 15)
    block = "def f(x):\n    return x\n" * 503

    def peak(count: int) -> int:
        tracemalloc.start()
        blocks = (block for _ in range(count))
        tokens = data.encode_documents([blocks], tokenizer, tmp_path / "a", isolate_documents=True)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(tokens) == 1
        return most

    few = peak(5)
    assert peak(50) - few < 300_000


@pytest.mark.parametrize("damaged", [False, True])
def test_an_encoding_that_was_stopped_goes_on_where_it_ended(
    tmp_path, tokenizer, monkeypatch, damaged
):
    monkeypatch.setattr(encoding, "_PART", 1_000)
    documents = [[f"document {n} " * 23, "\nends"] for n in range(17)]
    encode, seen, sizes = tokenizer.encode_batch, [], []

    def encode_documents(name, last=99):
        def counted(_, texts):
            seen.append(len(texts))
            if len(seen) > last:
                raise KeyboardInterrupt
            return encode(texts)

        seen.clear(), sizes.clear()
        place, options = tmp_path / name, {"isolate_documents": True, "progress": sizes.append}
        with monkeypatch.context() as patch:
            patch.setattr(type(tokenizer), "encode_batch", counted)
            return data.encode_documents(documents, tokenizer, place, **options)

    whole = encode_documents("whole.tokens")
    batches = len(seen)
    with pytest.raises(KeyboardInterrupt):
        encode_documents("a.tokens", last=3)
    kept = sorted((tmp_path / "a.parts").iterdir())
    assert len(kept) == 3 and not (tmp_path / "a.tokens").exists()
    if damaged:
        kept[0].write_bytes(kept[0].read_bytes()[:-7])
    documents[-1][0] += "changed"
    again = encode_documents("a.tokens")
    assert len(seen) == batches - 3 + damaged
    assert [row.tolist() for row in again][:-1] == [row.tolist() for row in whole][:-1]
    assert again.fingerprint != whole.fingerprint, "the text after it has changed"
    assert sizes == sorted(sizes)
    assert sizes[-1] == sum(len(block) for document in documents for block in document)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tokens", "whole.tokens"]
