"""Pairs of sentences to batches."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.errors import DataError
from jaxformer.text import data
from jaxformer.text.data import Bucket, PairBatches, Tokens
from jaxformer.text.tokenizers import BOS, EOS, PAD
from tests.text.examples import examples


def ragged(seed: int, count: int, longest: int) -> Tokens:
    rng = np.random.default_rng(seed)
    lengths = 1 + rng.geometric(0.2, count) % longest
    return Tokens.from_lists([rng.integers(4, 97, n).tolist() for n in lengths])


def batches_of(count: int = 331, **changes: int) -> PairBatches:
    settings = dict(
        seed=5, batch_tokens=256, buckets=3, max_len=31, pad_to_multiple=4, batch_size_multiple=4
    )
    return data.bucket_pairs(ragged(1, count, 23), ragged(2, count, 29), **settings | changes)


def sentences(rows: np.ndarray) -> list[list[int]]:
    """The ids of every row, without <bos>, <eos> and <pad>."""
    return [[int(i) for i in row if i not in (PAD, BOS, EOS)] for row in rows]


# Buckets


def test_a_sentence_of_50_000_tokens_that_fits_has_a_shape_of_its_own():
    long = np.arange(50_000) % 89 + 4
    text = Tokens.from_lists([[5, 7, 9]] * 30 + [long.tolist()] + [[6, 8]] * 30)
    batches = data.bucket_pairs(
        text, text, seed=5, batch_tokens=4_096, buckets=3, max_len=60_000, batch_size_multiple=2
    )
    assert [bucket.target_length for bucket in batches.buckets] == [8, 50_008]
    assert batches.buckets[-1].batch_size == 2 and batches.dropped["too_long"] == 0
    epoch = [batches.batch(step) for step in range(batches.steps_per_epoch)]
    wide = [batch for batch in epoch if batch.source.shape[1] > 8]
    assert [sentences(batch.source) for batch in wide] == [[long.tolist(), []]]
    rows = [ids for batch in epoch for ids in sentences(batch.target) if ids]
    assert len(rows) == 61


def positions(source: np.ndarray, target: np.ndarray, edges: tuple[int, ...]) -> int:
    """Positions of an epoch for buckets that end at `edges`, worked out the long way."""
    total, low, longest = 0, 0, np.maximum(source, target)
    for edge in edges:
        inside = (longest > low) & (longest <= edge)
        low = edge
        if inside.any():
            sizes = [-(-int(side[inside].max()) // 4) * 4 for side in (source, target)]
            rows = max(128 // sizes[1] // 4, 1) * 4
            total += -(-int(inside.sum()) // rows) * rows * sum(sizes)
    return total


@examples
@given(
    lengths=st.lists(st.tuples(st.integers(1, 27), st.integers(1, 27)), min_size=1, max_size=67),
    count=st.integers(1, 4),
)
def test_no_other_boundaries_need_fewer_positions(lengths, count):
    source, target = np.array(lengths).T
    plan = data.plan_buckets(
        source, target, batch_tokens=128, buckets=count, pad_to_multiple=4, batch_size_multiple=4
    )
    chosen = tuple(max(bucket[:2]) for bucket in plan)
    ends = [
        edges for n in range(1, count + 1) for edges in itertools.combinations(range(4, 29, 4), n)
    ]
    best = min(positions(source, target, e) for e in ends if e[-1] >= max(map(max, lengths)))
    assert len(plan) <= count and chosen == tuple(sorted(set(chosen)))
    assert positions(source, target, chosen) == best
    assert sum(bucket.batch_size for bucket in plan) <= best


def test_a_bucket_is_as_long_as_its_longest_sentences_and_has_rows_for_the_tokens():
    source, target = np.array([3, 5, 17, 2]), np.array([4, 2, 9, 18])
    (only,) = data.plan_buckets(source, target, batch_tokens=500, buckets=1)
    assert only == Bucket(24, 24, 16)  # 500 // 24 = 20, rounded down to 16
    (only,) = data.plan_buckets(
        source, target[:3].tolist() + [11], batch_tokens=500, buckets=1, pad_to_multiple=4
    )
    assert only == Bucket(20, 12, 40)  # 500 // 12 = 41
    (only,) = data.plan_buckets(
        source, target, batch_tokens=1, buckets=1, batch_size_multiple=3, max_len=19
    )
    assert only == Bucket(19, 19, 3)


@pytest.mark.usefixtures("misuse")
def test_buckets_of_no_pairs_are_refused():
    with pytest.raises(DataError, match="2 and 1"):
        data.plan_buckets(np.array([3, 4]), np.array([5]), batch_tokens=64, buckets=2)


# Batches


def test_a_batch_is_what_a_reader_would_write_down():
    source = Tokens.from_lists([[11, 12, 13], [14], [15, 16]])
    target = Tokens.from_lists([[21], [22, 23], [24, 25, 26]])
    batches = data.bucket_pairs(
        source,
        target,
        seed=3,
        batch_tokens=8,
        buckets=1,
        max_len=9,
        pad_to_multiple=5,
        batch_size_multiple=2,
    )
    assert batches.buckets == (Bucket(5, 5, 2),) and batches.steps_per_epoch == 2
    rows = {}
    for step in range(2):
        batch = batches.batch(step)
        assert batch.example_ids.tolist() == [0, 1]
        assert {array.dtype for array in batch} == {np.dtype(np.int32)}
        pairs = zip(batch.source.tolist(), batch.target.tolist(), strict=True)
        rows |= {source[0]: (source, target) for source, target in pairs}
    assert rows == {
        11: ([11, 12, 13, EOS, PAD], [BOS, 21, EOS, PAD, PAD, PAD]),
        14: ([14, EOS, PAD, PAD, PAD], [BOS, 22, 23, EOS, PAD, PAD]),
        15: ([15, 16, EOS, PAD, PAD], [BOS, 24, 25, 26, EOS, PAD]),
        PAD: ([PAD] * 5, [PAD] * 6),
    }
    assert batches.padding_share == pytest.approx(1 - (2 + 3 + 4) / (2 * 2 * 5))


def test_every_pair_occurs_once_an_epoch_and_in_another_order_in_the_next():
    batches = batches_of()
    expected = sorted(
        (s.tolist(), t.tolist()) for s, t in zip(batches.source, batches.target, strict=True)
    )
    orders = []
    for epoch in range(3):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        made = [batches.batch(step) for step in steps]
        pairs = [
            pair
            for batch in made
            for pair in zip(sentences(batch.source), sentences(batch.target), strict=True)
            if pair[0]
        ]
        assert sorted(pairs) == expected
        orders.append(pairs)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    shapes = [batch.source.shape for batch in made]
    assert shapes != sorted(shapes)


def test_a_batch_keeps_to_its_bucket_and_to_the_budget():
    batches = batches_of()
    shapes = {(b.source_length, b.target_length + 1, b.batch_size) for b in batches.buckets}
    seen = set()
    for step in range(batches.steps_per_epoch):
        batch = batches.batch(step)
        rows, width = batch.target.shape
        seen.add((batch.source.shape[1], width, rows))
        assert rows % 4 == 0 and rows * (width - 1) <= 256
        assert ((batch.source == EOS).sum(1) == (batch.target == BOS).sum(1)).all()
    assert seen == shapes and len(shapes) == 3


def test_empty_and_long_pairs_are_dropped_and_counted():
    source = Tokens.from_lists([[5], [], [6, 7], [8] * 10, [9] * 9, []])
    target = Tokens.from_lists([[5], [6], [], [8], [9] * 9, [7] * 10])
    batches = data.bucket_pairs(source, target, seed=1, batch_tokens=64, buckets=2, max_len=10)
    assert batches.dropped == {"empty": 3, "too_long": 1}
    assert sorted(batches.pairs.tolist()) == [0, 4]
    assert max(bucket.target_length for bucket in batches.buckets) == 10


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([[], [5] * 7], [[5], [6]], "none of 2 pairs .* 1 with an empty .* 1 longer .* 7"),
        ([], [], "none of 0 pairs"),
        ([[5], [6], [7]], [[5], [6]], "3 source and 2 target sentences"),
    ],
)
def test_sides_that_make_no_pairs_are_refused_with_their_numbers(source, target, message):
    sides = Tokens.from_lists(source), Tokens.from_lists(target)
    with pytest.raises(DataError, match=message):
        data.bucket_pairs(*sides, seed=1, batch_tokens=64, buckets=2, max_len=7)


def test_a_pair_that_no_bucket_holds_is_refused():
    tokens = ragged(1, 3, 5)
    with pytest.raises(DataError, match="bucket"):
        PairBatches((tokens, tokens), np.arange(3), (Bucket(1, 1, 8),), seed=1, dropped={})
