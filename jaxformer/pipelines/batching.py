"""Batches of few shapes: texts of similar length together, padded at their ends."""

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int

from jaxformer.text.tokenizers import PAD

BATCH_SIZE = 64
"""The most texts in a batch."""


def group_by_length(
    lengths: Sequence[int], max_len: int, batch_size: int = BATCH_SIZE
) -> Iterator[tuple[list[int], int]]:
    """Indices of up to `batch_size` nonempty items of similar length, and their padded length."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    sizes = {i: padded_length(lengths[i], max_len) for i in order}
    for size in sorted(set(sizes.values())):
        bucket = [i for i in order if sizes[i] == size]
        for start in range(0, len(bucket), batch_size):
            yield bucket[start : start + batch_size], size


def padded_length(length: int, max_len: int) -> int:
    """16, 32, 64, ... or `max_len`: the least of them that is at least `length` <= `max_len`."""
    return min(max(16, next_power_of_two(length)), max_len)


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def pad_right(
    texts: Sequence[Sequence[int] | np.ndarray], batch: int, length: int, pad: int = PAD
) -> Int[np.ndarray, "B T"]:
    """`texts` as [batch, length] int32, padded at their ends and with empty rows."""
    padded = np.full((batch, length), pad, np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    return padded


def pad_with_mask(
    texts: Sequence[Sequence[int]], batch: int, length: int
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """`pad_right`, and a mask that is True at the tokens of the texts."""
    padding_mask = pad_right([[1] * len(text) for text in texts], batch, length) == 1
    return pad_right(texts, batch, length), padding_mask
