"""Batches of items of several padded sizes, of few shapes: each shape is compiled once."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxformer.pipelines.batching import BATCH_SIZE, next_power_of_two

Size = tuple[int, ...]
"""The padded lengths of an item, such as a context's and its continuations'."""

BATCH_TOKENS = 2048
"""The most tokens of a batch of several items: their logits of GPT-2's vocabulary take 0.4 GB."""
PROGRAM_TOKENS = 4096
"""Empty tokens that cost less than a further program. On two CPU cores SmolLM2 135M is compiled in
about 15 s, in which it reads 5,000 tokens."""


class Batch(NamedTuple):
    """Items that one program reads together."""

    items: list[int]
    """Their indices."""
    size: Size
    """The lengths that each is padded to."""
    rows: int
    """The rows of the program; those beyond the items are empty."""


def join_batches(
    sizes: Sequence[Size],
    num_tokens: Callable[[Size], int],
    fits: Callable[[Size], bool] = lambda size: True,
) -> list[Batch]:
    """The items of `sizes` in batches of up to `BATCH_TOKENS` tokens, `num_tokens` each.

    Items are padded to a larger size that `fits`, where that costs less than a further program.

    >>> batches = join_batches([(16,), (32,), (16,), (64,)], lambda size: size[0])
    >>> [(batch.items, batch.size, batch.rows) for batch in batches]
    [([0, 2, 1, 3], (64,), 4)]
    """
    if not sizes:
        return []
    by_size: dict[Size, list[int]] = {}
    for i, size in enumerate(sizes):
        by_size.setdefault(size, []).append(i)
    ordered = sorted(by_size, key=lambda size: (num_tokens(size), size))

    def padding(items: list[int], size: Size) -> int:
        """The tokens that `items` have more in `size` than in their own sizes."""
        return sum(num_tokens(size) - num_tokens(sizes[i]) for i in items)

    def joins(items: list[int], size: Size) -> bool:
        """Whether `items` are better padded to `size` than read by two programs."""
        return fits(size) and padding(items, size) <= PROGRAM_TOKENS

    # From the smallest size on, items wait for the next larger ones and join them, or are read.
    batches: list[Batch] = []
    waiting: list[int] = []
    waiting_size = ordered[0]
    for size in ordered:
        items = by_size[size]
        joined = _enclosing(waiting_size, size)
        if not joins(waiting + items, joined):  # full batches are read: fewer items may join
            rows = _most_rows(num_tokens(waiting_size))
            count = len(waiting) // rows * rows
            batches += _cut(waiting[:count], waiting_size, rows)
            waiting = waiting[count:]
        if not joins(waiting + items, joined):
            rows = _fewest_rows(len(waiting), num_tokens(waiting_size))
            batches += _cut(waiting, waiting_size, rows)
            waiting = []
        waiting_size = joined if waiting else size
        waiting = waiting + items
    # The last ones are read by a program that is there already, where it costs less.
    programs = [batch for batch in batches if _enclosing(batch.size, waiting_size) == batch.size]
    smallest = min(programs, key=lambda batch: num_tokens(batch.size), default=None)
    if smallest is not None and padding(waiting, smallest.size) <= PROGRAM_TOKENS:
        return batches + _cut(waiting, smallest.size, smallest.rows)
    rows = _fewest_rows(len(waiting), num_tokens(waiting_size))
    return batches + _cut(waiting, waiting_size, rows)


def _enclosing(one: Size, other: Size) -> Size:
    """The smallest size into which items of two sizes fit."""
    return tuple(map(max, one, other))


def _cut(items: list[int], size: Size, rows: int) -> list[Batch]:
    """`items` in batches of `rows` rows, of which the last may have empty ones."""
    return [Batch(items[start : start + rows], size, rows) for start in range(0, len(items), rows)]


def _fewest_rows(items: int, num_tokens: int) -> int:
    """The rows of a program for so many items of `num_tokens` tokens alone."""
    return min(next_power_of_two(items), _most_rows(num_tokens))


def _most_rows(num_tokens: int) -> int:
    """The largest power of two of rows with so many tokens that a batch may have."""
    rows = max(1, min(BATCH_SIZE, BATCH_TOKENS // num_tokens))
    return 1 << (rows.bit_length() - 1)
