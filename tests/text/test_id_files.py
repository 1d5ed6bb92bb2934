"""Ids that other programs wrote: each kind of file, rows across files, separators, refusals."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import MaskedStream, Stream, StreamBatch, Tokens, iterate_once
from jaxformer.text.tokenizers import SpecialTokens
from tests.text.examples import examples
from tests.two_processes import finished, start

END = 11
"""The id that separates documents."""


def drawn(count: int, seed: int = 3, *, separator: float = 0.1) -> np.ndarray:
    """`count` ids of 0 to 10, and END between documents."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < separator, END, rng.integers(0, END, count))


def write_nanogpt(path: Path, ids: np.ndarray) -> Path:
    """Writes `ids` as nanoGPT's prepare.py does."""
    ids.astype(np.uint16).tofile(path)
    return path


def write_llm_c(path: Path, ids: np.ndarray, *, llama: bool = False) -> Path:
    """Writes `ids` as llm.c's write_datafile does, for GPT-2 or Llama 3."""
    header = np.zeros(256, np.int32)
    header[:3] = (20240801, 7, len(ids)) if llama else (20240520, 1, len(ids))
    path.write_bytes(header.tobytes() + ids.astype(np.uint32 if llama else np.uint16).tobytes())
    return path


def write_npy(path: Path, ids: np.ndarray, kind: str = "int64") -> Path:
    """Writes `ids` as `numpy.save` does."""
    np.save(path, ids.astype(kind))
    return path


def in_parts(folder: Path, ids: np.ndarray, cuts: list[int]) -> list[Path]:
    """`ids` in files of four kinds in turn, cut at `cuts`."""
    paths = []
    for i, part in enumerate(np.split(ids, cuts)):
        if i % 4 == 0:
            paths.append(write_llm_c(folder / f"{i}.bin", part))
        elif i % 4 == 1:
            paths.append(write_npy(folder / f"{i}.npy", part, ">i8" if i % 8 == 1 else "uint8"))
        elif i % 4 == 2:
            paths.append(write_nanogpt(folder / f"{i}.bin", part))
        else:
            paths.append(write_llm_c(folder / f"{i}.bin", part, llama=True))
    return paths


def in_memory(ids: np.ndarray) -> Tokens:
    return Tokens(ids.astype(np.uint32), np.array([0, len(ids)]))


def assert_equal(batches, others) -> None:
    for batch, other in zip(batches, others, strict=True):
        for a, b in zip(batch, other, strict=True):
            np.testing.assert_array_equal(a, b)


# Reading


@pytest.mark.parametrize("kind", ["uint8", "int16", "uint16", "int32", "uint32", "int64", ">u4"])
def test_integers_of_every_width_in_npy_are_read_as_they_are(tmp_path, kind):
    ids = drawn(131)
    path = write_npy(tmp_path / "a.npy", ids, kind)
    tokens = Tokens.open(path)
    assert tokens.ids[:].tolist() == ids.tolist() and tokens.ids[:].dtype == np.int32
    assert tokens.take(np.array([[7, 0], [130, 5]])).tolist() == ids[[[7, 0], [130, 5]]].tolist()


@pytest.mark.parametrize("isolate", [False, True])
def test_batches_of_files_of_all_kinds_are_those_of_one_array_of_their_ids(tmp_path, isolate):
    ids = drawn(1009)
    files = Tokens.open(in_parts(tmp_path, ids, [97, 100, 101, 401, 997, 1003]), document_id=END)
    one = Tokens.open(write_npy(tmp_path / "one.npy", ids), document_id=END)
    sizes = {"batch_size": 5, "seq_len": 13, "isolate_documents": isolate}
    for step in range(3 * Stream(one, seed=7, **sizes).steps_per_epoch):
        batches = [Stream(x, seed=7, **sizes).batch(step) for x in (files, one)]
        assert_equal(batches[:1], batches[1:])
        if not isolate:
            plain = Stream(in_memory(ids), seed=7, **sizes).batch(step)
            assert_equal([plain], batches[:1])
    assert_equal(iterate_once(files, **sizes), iterate_once(one, **sizes))


def test_masked_batches_of_several_files_are_those_of_one_array(tmp_path):
    ids = drawn(401)
    options = {
        "batch_size": 3,
        "seq_len": 17,
        "seed": 5,
        "special": SpecialTokens(bos=1, eos=2, mask=3),
        "vocab_size": 13,
    }
    files = Tokens.open(in_parts(tmp_path, ids, [7, 131, 200]))
    streams = [MaskedStream(x, **options) for x in (files, in_memory(ids))]
    assert_equal(*([stream.batch(step) for step in range(11)] for stream in streams))


def walked(batch: StreamBatch) -> None:
    """Checks segments and positions of a batch by walking through every row."""
    for tokens, segments, positions, mask in zip(
        batch.tokens, batch.segments, batch.positions, batch.loss_mask, strict=True
    ):
        count = int((segments > 0).sum())
        segment, position = 1, -1
        for i in range(count):
            is_new = i > 0 and tokens[i] == END
            segment, position = (segment + 1, 0) if is_new else (segment, position + 1)
            assert (segments[i], positions[i]) == (segment, position)
        assert not segments[count:].any() and not positions[count:].any()
        assert mask.tolist() == [i + 1 < count for i in range(len(mask))]


@examples
@given(
    ids=st.lists(st.integers(9, END), min_size=12, max_size=97),
    rows=st.integers(1, 3),
    length=st.sampled_from([1, 5, 11]),
)
def test_attention_stops_at_the_separator_which_is_a_label_too(tmp_path_factory, ids, rows, length):
    path = write_nanogpt(tmp_path_factory.mktemp("ids") / "a.bin", np.array(ids))
    tokens = Tokens.open(path, document_id=END)
    sizes = {"batch_size": rows, "seq_len": length, "isolate_documents": True}
    stream = Stream(tokens, seed=1, **sizes)
    epoch = [stream.batch(step) for step in range(stream.steps_per_epoch)]
    for batch in epoch:
        walked(batch)
    labels = [int(x) for batch in epoch for x in batch.tokens[:, 1:][batch.loss_mask]]
    assert sorted(labels) == sorted(ids[1:])  # each label counts once, also the separators


def test_a_pattern_names_the_files_in_the_order_of_their_names(tmp_path):
    for i in (10, 2, 1):
        write_llm_c(tmp_path / f"text_train_{i:03d}.bin", np.full(7, i))
    write_llm_c(tmp_path / "text_val_000.bin", np.full(5, 4))
    tokens = Tokens.open(tmp_path / "text_train_*.bin")
    assert tokens.ids[:].tolist() == [1] * 7 + [2] * 7 + [10] * 7
    both = Tokens.open([str(tmp_path / "*_val_*"), tmp_path / "text_train_002.bin"])
    assert both.ids[:].tolist() == [4] * 5 + [2] * 7
    odd = write_llm_c(tmp_path / "a[1].bin", np.full(3, 8))  # a file with the letters of a pattern
    assert Tokens.open(odd).ids[:].tolist() == [8] * 3
    with pytest.raises(DataError, match="nothing_"):
        Tokens.open(tmp_path / "nothing_*.bin")


def test_a_stretch_of_files_is_cut_without_reading(tmp_path):
    ids = drawn(307)
    tokens = Tokens.open(in_parts(tmp_path, ids, [101, 103]), document_id=END)
    part = tokens.between(97, 211)
    assert part.ids[:].tolist() == ids[97:211].tolist()
    assert part.document_id == END and len(part.ids) == 114
    assert part.fingerprint != tokens.fingerprint != tokens.between(0, 306).fingerprint


# The fingerprint


def test_the_fingerprint_sees_names_sizes_headers_samples_and_the_separator(tmp_path):
    ids = drawn(50_021)
    names = ("a", "b", "c", "d", "e")
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
    write_llm_c(folders[0] / "x.bin", ids)
    write_llm_c(folders[1] / "y.bin", ids)
    write_llm_c(folders[2] / "x.bin", ids[:-1])
    write_nanogpt(folders[3] / "x.bin", ids)
    changed = ids.copy()
    changed[-1] += 1  # the last place is a sample
    write_llm_c(folders[4] / "x.bin", changed)
    prints = [Tokens.open(folder / "*.bin").fingerprint for folder in folders]
    prints.append(Tokens.open(folders[0] / "x.bin", document_id=END).fingerprint)
    assert len(set(prints)) == 6
    (tmp_path / "moved").mkdir()
    write_llm_c(tmp_path / "moved" / "x.bin", ids)
    assert Tokens.open(tmp_path / "moved" / "x.bin").fingerprint == prints[0]


# Memory


MEASURE = """
import sys
from jaxformer.text.data import Stream, Tokens
def anonymous():
    lines = (line.split() for line in open("/proc/self/status"))
    return next(int(line[1]) for line in lines if line[0] == "RssAnon:")
for pattern in sys.argv[1:]:
    tokens = Tokens.open(pattern, document_id=0)
    stream = Stream(tokens, batch_size=7, seq_len=257, seed=1, isolate_documents=True)
    stream.fingerprint
    for step in range(200):
        assert stream.batch(step * 7919).tokens.shape == (7, 258)
    print(len(tokens.ids), anonymous())
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
def test_two_gigabytes_in_twenty_shards_need_no_more_memory_than_two_megabytes(tmp_path):
    for name, count in (("small", 50_021), ("large", 50_000_017)):
        for i in range(20):
            path = write_llm_c(tmp_path / f"{name}_{i:02d}.bin", np.zeros(1))
            with open(path, "r+b") as file:  # the disk holds nothing of the zeros
                file.seek(8)
                file.write(np.int32(count).tobytes())
            os.truncate(path, 1024 + 2 * count)
    patterns = [tmp_path / f"{name}_*.bin" for name in ("small", "large")]
    (done,) = finished(start("-c", MEASURE, *patterns))
    (few, small), (many, large) = (map(int, line.split()) for line in done.out.splitlines())
    assert (few, many) == (20 * 50_021, 20 * 50_000_017)
    assert large - small < 50 << 10


# Refusals


@pytest.mark.parametrize("name", ["ids.bin", "a.npy"])
def test_an_id_beyond_the_vocabulary_is_found_with_file_and_place(tmp_path, name):
    ids = drawn(211)
    ids[173] = 12
    write_llm_c(tmp_path / "0.bin", drawn(97))
    write = write_npy if name.endswith("npy") else write_llm_c
    write(tmp_path / name, ids)
    tokens = Tokens.open([tmp_path / "0.bin", tmp_path / name], vocab_size=12)
    stream = Stream(tokens, batch_size=3, seq_len=7, seed=1, isolate_documents=False)
    message = f"{name}, id number 173 of the file: 12 is outside the vocabulary of 12"
    with pytest.raises(DataError, match=message):
        for step in range(stream.steps_per_epoch):
            stream.batch(step)
    with pytest.raises(DataError, match=message):
        tokens.take(np.array([[3, 97 + 173]]))


@pytest.mark.parametrize(
    ("kind", "wrong"), [("int32", -1), ("int64", 1 << 40), ("uint64", 1 << 63), ("uint32", 1 << 31)]
)
def test_a_number_that_is_no_id_is_found_and_not_turned_into_one(tmp_path, kind, wrong):
    ids = np.full(31, 7, kind)
    ids[23] = wrong
    np.save(tmp_path / "a.npy", ids)
    tokens = Tokens.open(tmp_path / "a.npy")
    for read in (
        lambda: tokens.take(np.arange(31)),
        lambda: tokens.rows(np.array([20]), np.array([5]), 5),
    ):
        with pytest.raises(DataError, match=f"a.npy, id number 23 .*{wrong} "):
            read()


def header(*numbers: int) -> bytes:
    return np.array([*numbers, *[0] * (256 - len(numbers))], "<i4").tobytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.bin", None, "absent.bin"),
        ("empty.bin", b"", "empty.bin"),
        ("odd.bin", b"\1\0\2\0\3", "odd.bin: 5 bytes are no whole number"),
        ("none.bin", header(20240520, 1, 0), "none.bin"),
        ("cut.bin", header(20240520, 1, 7) + bytes(12), "7 ids"),
        ("long.bin", header(20240520, 1, 7) + bytes(16), "need 1,038 bytes"),
        ("short.bin", header(20240520, 1, 7)[:100], "short.bin"),
        ("less.bin", header(20240520, 1, -7) + bytes(14), "less.bin"),
        ("wide.bin", header(20240801, 7, 7) + bytes(14), "wide.bin"),
        ("old.bin", header(20240801, 1, 7) + bytes(14), "version 1"),
        ("new.bin", header(20240520, 2, 7) + bytes(14), "version 2"),
        ("quiz.bin", header(20240522, 1, 7) + bytes(14), "quiz.bin holds llm.c's multiple-choice"),
        ("zip.bin", b"PK\x03\x04" + bytes(16), "zip.bin"),
        ("a.bin.gz", b"\x1f\x8b" + bytes(16), "a.bin.gz"),
        ("text.bin", b"To be, or not to be.\n" * 20, "text.bin"),
        ("greek.bin", "Ἐν ἀρχῇ ".encode() * 50, "greek.bin"),
        ("thin.npy", bytes(16), "thin.npy"),
        ("cut.npy", b"\x93NUMPY\1\0", "cut.npy"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        Tokens.open(tmp_path / name)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 5), np.int32), "int32 with the shape .3, 5.*one dimension"),
        (np.zeros(5), "float64 with the shape .5,."),
        (np.array(["a", "b"]), "<U1 with the shape"),
        (np.array([{}]), "a.npy"),
        (np.zeros(0, np.int32), "a.npy"),
    ],
)
def test_an_array_without_ids_is_refused_with_what_it_holds(tmp_path, array, message):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=message):
        Tokens.open(tmp_path / "a.npy")


def test_ids_of_32_bits_without_a_header_are_not_read_as_twice_as_many(tmp_path):
    ids = np.random.default_rng(1).integers(0, 128_256, 997).astype("<u4")
    ids.tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match="a.bin"):
        Tokens.open(tmp_path / "a.bin")
    few = np.random.default_rng(1).integers(0, 4, 997).astype("<u2")  # a vocabulary of four
    few.tofile(tmp_path / "b.bin")
    assert Tokens.open(tmp_path / "b.bin").ids[:].tolist() == few.tolist()


def test_a_separator_outside_the_vocabulary_and_an_empty_list_are_refused(tmp_path):
    write_nanogpt(tmp_path / "a.bin", drawn(31))
    for document_id, vocab_size in ((-1, None), (13, 13), (50256, 97)):
        with pytest.raises(ConfigError, match=f"document_id={document_id}"):
            Tokens.open(tmp_path / "a.bin", document_id=document_id, vocab_size=vocab_size)
    with pytest.raises(DataError, match="no file of ids was given"):
        Tokens.open([])
