"""Parts of sequences of ids as arrays, with checks of their ids."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from jaxformer.errors import DataError, shorten

MOST_IDS = 1 << 31
"""The most ids of a vocabulary: batches hold them as int32."""


class Row(NamedTuple):
    """A part of a sequence."""

    ids: np.ndarray
    number: int
    """The number of the sequence."""
    ends: bool
    """Whether the sequence ends with it."""


def numbered_rows(
    parts: Iterable[tuple[Sequence[int] | np.ndarray, bool]],
) -> Iterator[Row]:
    """Each of `parts` as an array, with the number of its sequence.

    Raises `DataError` for a part that is no list of integers.
    """
    number = 0
    for part, ends in parts:
        row = np.asarray(part)
        if row.ndim == 1 and row.size == 0:
            row = np.empty(0, np.int64)
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise DataError(
                f"sequence {number} must be a list of integers, got {shorten(repr(part))}"
            )
        yield Row(row, number, ends)
        number += ends


def checked_ids(rows: Sequence[Row], vocab_size: int) -> Int64[np.ndarray, " ids"]:
    """The ids of all `rows`; `DataError`, with its number, for the first one with a wrong id."""
    # An id from 2^63 on becomes negative, which is wrong as well.
    arrays = [np.empty(0, np.int64), *(row.ids for row in rows)]
    ids = np.concatenate(arrays, dtype=np.int64, casting="unsafe")
    if _is_outside(ids, vocab_size):
        wrong = next(row for row in rows if _is_outside(row.ids, vocab_size))
        raise DataError(
            f"sequence {wrong.number}: ids must be 0 to {vocab_size - 1}, "
            f"got {wrong.ids.min()} to {wrong.ids.max()}; is it the right tokenizer?"
        )
    return ids


def _is_outside(row: Integer[np.ndarray, " ids"], vocab_size: int) -> bool:
    """Whether an id of `row` is none of the vocabulary's."""
    return bool(row.size and (row.min() < 0 or row.max() >= vocab_size))
