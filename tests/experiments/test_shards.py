"""Shards of ids are those of nanoGPT and llm.c, read without copying, and written the same."""

import numpy as np
import pytest

from experiments.language_modelling.shards import open_shard, shard_documents, write_shards
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import Tokens
from jaxformer.text.data.tokens import write_parts

ROWS = [[7, 5, 3], [7], [7, 65_535, 2, 2, 11]]


def formula(path, ids, magic=20240520, version=1, count=None):
    """A file as `data/fineweb.py` of modded-nanogpt makes it."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, np.uint16).tobytes())
    return path


@pytest.fixture
def tokens():
    return Tokens.from_lists(ROWS, vocab_size=1 << 16)


def test_the_ids_of_a_shard_are_read_with_and_without_a_header(tmp_path):
    flat = sum(ROWS, [])
    ids = open_shard(formula(tmp_path / "a.bin", flat))
    assert ids.tolist() == flat and isinstance(ids.base.base, np.memmap)
    np.array(flat, np.uint16).tofile(tmp_path / "b.bin")
    assert open_shard(tmp_path / "b.bin").tolist() == flat


@pytest.mark.parametrize("size", [4, 100])
def test_written_shards_are_those_of_the_formula(tmp_path, tokens, size):
    paths = write_shards(tokens, tmp_path / "out", name="val", ids_per_shard=size)
    flat = sum(ROWS, [])
    assert [path.name for path in paths] == [f"val_{i:06d}.bin" for i in range(-(-9 // size))]
    for i, path in enumerate(paths):
        expected = formula(tmp_path / "expected.bin", flat[i * size : (i + 1) * size])
        assert path.read_bytes() == expected.read_bytes()
    (bare,) = write_shards(tokens, tmp_path / "bare", header=False)
    assert bare.read_bytes() == np.array(flat, np.uint16).tobytes()


def test_documents_begin_at_their_mark_also_across_shards(tmp_path, tokens):
    paths = write_shards(tokens, tmp_path, ids_per_shard=2)
    by_two = [[7, 5, 3, 7, 7, 65_535], [2], [2, 11]]
    for begin, expected in ((7, ROWS), (None, [sum(ROWS, [])]), (2, by_two)):
        parts = shard_documents(paths, begin)
        found = write_parts(tmp_path / "a.tokens", parts, vocab_size=1 << 16)
        assert [row.tolist() for row in found] == expected


@pytest.mark.parametrize(
    "change, said",
    [
        ({"version": 7}, "a.bin: the header has version 7; only 1 is supported"),
        (
            {"count": 5},
            "a.bin: the header promises 5 ids, 1034 bytes in all, but the file",
        ),
        ({"count": -1}, "a.bin: the header promises -1 ids"),
        ({"magic": 20240801, "version": 7}, "a.bin: a header with the magic number 20240801"),
    ],
)
def test_a_wrong_header_is_named(tmp_path, change, said):
    with pytest.raises(DataError, match=said):
        open_shard(formula(tmp_path / "a.bin", [3, 5, 7], **change))


def test_what_is_no_shard_is_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    with pytest.raises(DataError, match="a.bin: 3 bytes are no uint16 ids"):
        open_shard(tmp_path / "a.bin")
    with pytest.raises(DataError, match="absent.bin: cannot open the shard"):
        open_shard(tmp_path / "absent.bin")
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(DataError, match="a.bin: cannot open the shard"):
        open_shard(tmp_path / "a.bin")


def test_ids_of_more_than_two_bytes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="but the vocabulary has 65537 ids"):
        write_shards(Tokens.from_lists([[1]], vocab_size=65_537), tmp_path)
