"""Streams of documents to batches: every label once, documents apart, nothing held in memory."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from jaxformer.errors import ConfigError, DataError
from jaxformer.text import data
from jaxformer.text.data import Stream, StreamBatch, Tokens
from jaxformer.text.data.streams import permute
from tests.two_processes import finished, start

LENGTHS = (5, 0, 1, 17, 2, 0, 0, 31, 3, 13, 1)


def counted(total: int) -> Tokens:
    """One document whose ids are their own places."""
    return Tokens(np.arange(total, dtype=np.uint32), np.array([0, total]))


def documents(lengths: tuple[int, ...] = LENGTHS) -> Tokens:
    """Documents of these lengths, of which the ids are their places in the whole."""
    return Tokens(np.arange(sum(lengths), dtype=np.uint32), np.cumsum([0, *lengths]))


def epoch(stream: Stream, number: int = 0) -> list[StreamBatch]:
    steps = stream.steps_per_epoch
    return [stream.batch(step) for step in range(number * steps, (number + 1) * steps)]


def counted_labels(batches) -> list[int]:
    return [int(label) for batch in batches for label in batch.tokens[:, 1:][batch.loss_mask]]


# The order


def keys_of(seed: int, rounds: int = 8) -> np.ndarray:
    return np.random.Philox(key=seed).random_raw(rounds)


def test_an_order_may_be_asked_for_place_by_place_and_is_never_held():
    n = 2**40 - 87
    places = np.array([0, 1, n - 1, 12_345_678_901])
    whole = permute(places, n, keys_of(7))
    assert [int(permute(places[i : i + 1], n, keys_of(7))[0]) for i in range(4)] == whole.tolist()
    assert len(set(whole.tolist())) == 4 and whole.min() >= 0 and whole.max() < n


def test_every_order_of_four_things_is_as_likely_as_any_other():
    found = [tuple(permute(np.arange(4), 4, keys_of(seed)).tolist()) for seed in range(480)]
    counts = np.array([found.count(order) for order in itertools.permutations(range(4))])
    # 23 degrees of freedom: more than 60 has a probability of about 4e-5.
    assert ((counts - 20) ** 2 / 20).sum() < 60


# Batches


@pytest.mark.parametrize(
    ("total", "rows", "length"), [(211, 3, 7), (212, 5, 13), (8, 2, 7), (331, 7, 1), (97, 97, 2)]
)
def test_every_label_counts_exactly_once_an_epoch(total, rows, length):
    stream = Stream(
        counted(total), batch_size=rows, seq_len=length, seed=5, isolate_documents=False
    )
    for number in range(4):
        batches = epoch(stream, number)
        assert sorted(counted_labels(batches)) == list(range(1, total))
        assert all(batch.tokens.shape == (rows, length + 1) for batch in batches)


def test_every_label_but_the_first_of_a_document_counts_exactly_once_an_epoch():
    tokens = documents()
    stream = Stream(tokens, batch_size=3, seq_len=7, seed=5, isolate_documents=True)
    expected = sorted(set(range(len(tokens.ids))) - set(tokens.offsets.tolist()))
    for number in range(4):
        assert sorted(counted_labels(epoch(stream, number))) == expected


def test_a_row_is_a_piece_of_the_text_and_little_is_left_empty():
    stream = Stream(counted(5003), batch_size=4, seq_len=11, seed=3, isolate_documents=False)
    batches = epoch(stream)
    for batch in batches:
        assert (np.diff(batch.tokens)[batch.loss_mask] == 1).all()
        assert (batch.tokens[:, 1:][~batch.loss_mask] == 0).all()
        assert batch.example_ids.tolist() == [0, 1, 2, 3]
        assert batch.segments is batch.positions is None
    partly = sum((~batch.loss_mask.all(axis=1)).sum() for batch in batches)
    assert partly <= 2 + 3  # the two ends of the text, and the end of the last batch


def test_epochs_differ_in_phase_and_in_order():
    stream = Stream(counted(5003), batch_size=4, seq_len=11, seed=3, isolate_documents=False)
    firsts = [
        np.concatenate([b.tokens[b.loss_mask.all(1), 0] for b in epoch(stream, e)]) for e in (0, 1)
    ]
    phases = [set((first % 11).tolist()) for first in firsts]
    assert len(phases[0]) == len(phases[1]) == 1 and phases[0] != phases[1]
    for first in firsts:
        assert abs(np.corrcoef(first, np.arange(len(first)))[0, 1]) < 0.2


def plain_rows(tokens: Tokens, batch: StreamBatch) -> None:
    """Checks segments, positions and loss_mask of a batch by walking through every row."""
    owner = np.repeat(np.arange(len(tokens)), tokens.lengths)
    for r in range(len(batch.example_ids)):
        text = batch.segments[r] > 0
        ids = batch.tokens[r][text]
        segment, position, expected = 0, 0, []
        for i, id in enumerate(ids):
            new = i == 0 or owner[ids[i - 1]] != owner[id]
            segment, position = (segment + 1, 0) if new else (segment, position + 1)
            expected.append((segment, position, not new))
        found = zip(
            batch.segments[r], batch.positions[r], [False, *batch.loss_mask[r]], strict=True
        )
        found = list(found)
        assert found[: len(ids)] == expected
        assert set(found[len(ids) :]) <= {(0, 0, False)}


def test_segments_number_the_documents_of_a_row_and_positions_restart_in_each():
    tokens = documents()
    stream = Stream(tokens, batch_size=3, seq_len=13, seed=2, isolate_documents=True)
    for batch in [
        *epoch(stream),
        *data.iterate_once(tokens, batch_size=2, seq_len=7, isolate_documents=True),
    ]:
        plain_rows(tokens, batch)


# The whole, in order


@pytest.mark.parametrize("stride", [None, 7, 5, 1])
@pytest.mark.parametrize("total", [2, 7, 8, 9, 64, 100])
def test_a_cover_counts_every_label_once_and_in_order(total, stride):
    batches = list(
        data.iterate_once(
            counted(total), batch_size=3, seq_len=7, stride=stride, isolate_documents=False
        )
    )
    assert counted_labels(batches) == list(range(1, total))
    assert {batch.tokens.shape for batch in batches} == {(3, 8)}
    tokens = documents()
    batches = data.iterate_once(
        tokens, batch_size=3, seq_len=7, stride=stride, isolate_documents=True
    )
    starts = set(tokens.offsets.tolist())
    assert counted_labels(batches) == [i for i in range(len(tokens.ids)) if i not in starts]


def test_a_smaller_stride_gives_every_label_some_context():
    for batch in data.iterate_once(
        counted(200), batch_size=3, seq_len=13, stride=4, isolate_documents=False
    ):
        column = np.argmax(batch.loss_mask, axis=1)
        first = batch.tokens[np.arange(3), column + 1]
        assert ((column + 1 >= 13 - 4) | (first < 13) | ~batch.loss_mask.any(axis=1)).all()


# Memory


def sparse_tokens(path: Path, total: int, borders: list[int]) -> None:
    """A token file of `total` ids 0, of which the disk holds only the ends."""
    data.write_tokens(path, [[0]], vocab_size=11)
    header, digest = bytearray(path.read_bytes()[:64]), path.read_bytes()[-32:]
    header[24:40] = np.array([len(borders) + 1, total], "<i8").tobytes()
    path.write_bytes(header)
    os.truncate(path, 64 + 2 * total + -2 * total % 8)
    with open(path, "ab") as file:
        file.write(np.array([0, *borders, total], "<i8").tobytes() + digest)


MEASURE = """
import sys
from jaxformer.text.data import Stream, iterate_once, open_tokens
def resident():
    lines = (line.split() for line in open("/proc/self/status"))
    found = {line[0]: int(line[1]) for line in lines if line[0] in ("RssAnon:", "RssFile:")}
    return found["RssAnon:"], found["RssFile:"]
for path in sys.argv[1:]:
    before = resident()
    tokens = open_tokens(path)
    stream = Stream(tokens, batch_size=8, seq_len=256, seed=1, isolate_documents=False)
    stream.fingerprint
    opened = resident()
    most = 0
    for step in range(200):
        assert stream.batch(step * 7919).tokens.shape == (8, 257)
        most = max(most, resident()[0])
    print(opened[1] - before[1], most)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is told by Linux only")
def test_two_gigabytes_of_ids_need_no_more_memory_than_two_megabytes(tmp_path):
    sizes = (1_000_003, 1_000_000_007)
    for total in sizes:
        sparse_tokens(tmp_path / f"{total}", total, [total // 7, total // 3, total // 2])
    (done,) = finished(start("-c", MEASURE, *(tmp_path / f"{total}" for total in sizes)))
    (read, small), (more_read, large) = (map(int, line.split()) for line in done.out.splitlines())
    assert max(read, more_read) < 20 << 10, "opening reads the file through"
    assert large - small < 50 << 10


# Refusals


def test_a_cover_of_one_id_is_refused_with_both_numbers():
    with pytest.raises(DataError, match="1 ids"):
        next(data.iterate_once(counted(1), batch_size=2, seq_len=7, isolate_documents=False))


def test_a_stride_that_skips_is_refused():
    for stride in (0, 8):
        with pytest.raises(ConfigError, match="stride .*seq_len .7."):
            next(
                data.iterate_once(
                    counted(97), batch_size=2, seq_len=7, stride=stride, isolate_documents=False
                )
            )
