"""Texts of many lengths in few shapes, so that few programs are compiled."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.tokenizers import PAD, Tokenizer


def check_fit(model: Any, tokenizer: Tokenizer) -> None:
    """Raises `ConfigError` for a tokenizer with ids that the model does not know."""
    size = model.config.vocab_size
    if tokenizer.vocab_size > size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model knows only {size}: give "
            "the tokenizer that it was trained with"
        )


def groups(lengths: Sequence[int], max_len: int, rows: int) -> Iterator[tuple[list[int], int]]:
    """Up to `rows` numbers of nonempty items of similar length, and the size they pad to."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    sizes = {i: padded_size(lengths[i], max_len) for i in order}
    for size in sorted(set(sizes.values())):
        bucket = [i for i in order if sizes[i] == size]
        for start in range(0, len(bucket), rows):
            yield bucket[start : start + rows], size


def share(count: int, programs: int, most: int) -> int:
    """How many rows each program takes of `count`: 1, 2, 4, ... or `most`."""
    return min(power_of_two(-(-count // programs)), most)


def padded_size(length: int, most: int) -> int:
    """16, 32, 64, ... or `most`: the least that holds `length`, which is at most `most`."""
    return min(max(16, power_of_two(length)), most)


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def pad(texts: Sequence[Sequence[int]], rows: int, size: int, padding: int = PAD) -> np.ndarray:
    """`texts` as [rows, size] int32, padded at their ends and with empty rows."""
    padded = np.full((rows, size), padding, np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    return padded


def pad_left(texts: Sequence[Sequence[int]], rows: int, size: int) -> np.ndarray:
    """`texts` as [rows, size] int32, all of which end at the last place."""
    padded = np.full((rows, size), PAD, np.int32)
    for row, text in enumerate(texts):
        padded[row, size - len(text) :] = text
    return padded
