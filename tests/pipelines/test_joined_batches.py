"""Batches of few shapes: every item once, in rows that hold it, and little padding."""

from collections import Counter

import pytest

from jaxformer.pipelines.joined_batches import (
    BATCH_TOKENS,
    PROGRAM_TOKENS,
    join_batches,
)


def length(size):
    return size[0]


@pytest.mark.parametrize("seed", range(5))
def test_each_item_is_in_one_batch_that_has_room_for_it(seed, rng):
    counts = rng.integers(1, 90, 5)
    drawn = rng.permutation(rng.choice(16 << rng.integers(0, 6, 5), counts.sum()))
    sizes = [(int(size), int(count)) for size, count in zip(drawn, drawn // 16, strict=True)]
    batches = join_batches(sizes, lambda size: size[0] + size[1])
    assert sorted(i for batch in batches for i in batch.items) == list(range(len(sizes)))
    for batch in batches:
        assert 0 < len(batch.items) <= batch.rows
        assert batch.rows == 1 or batch.rows * sum(batch.size) <= BATCH_TOKENS
        for i in batch.items:
            assert all(a >= b for a, b in zip(batch.size, sizes[i], strict=True))


def test_few_items_of_many_lengths_are_one_program():
    sizes = [(16 << i % 3, 4, 8 << i % 2) for i in range(29)]
    batches = join_batches(sizes, lambda size: size[0] + size[1] * size[2])
    assert {(batch.size, batch.rows) for batch in batches} == {((64, 4, 16), 16)}
    sizes = [(16, 4, 16)] * 20 + [(16, 4, 32)] * 9
    batches = join_batches(sizes, lambda size: size[0] + size[1] * size[2])
    assert {(batch.size, batch.rows) for batch in batches} == {((16, 4, 32), 8)}


def test_items_that_fill_batches_are_not_padded_and_the_last_ones_take_a_program_that_is_there():
    sizes = [(16,)] * 130 + [(256,)] * 17
    batches = join_batches(sizes, length)
    shapes = Counter((batch.size, batch.rows) for batch in batches)
    assert shapes == {((16,), 64): 2, ((256,), 8): 3}


def test_padding_that_costs_more_than_a_program_is_avoided():
    longest = PROGRAM_TOKENS
    batches = join_batches([(16,)] * 3 + [(longest,)], length)
    assert sorted((batch.items, batch.size) for batch in batches) == [
        ([0, 1, 2], (16,)),
        ([3], (longest,)),
    ]


def test_sizes_that_do_not_fit_together_stay_apart():
    batches = join_batches([(64, 16), (16, 64)], sum, lambda size: sum(size) <= 80)
    assert sorted(batch.size for batch in batches) == [(16, 64), (64, 16)]
    assert join_batches([], length) == []
