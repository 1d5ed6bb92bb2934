"""Random bits from a seed, and windows over a corpus in a random order that takes no memory."""

from collections.abc import Callable
from math import isqrt

import numpy as np
from jaxtyping import Int64, UInt64

from jaxformer.errors import ConfigError

RowSelection = Callable[[int], Int64[np.ndarray, " W"]]
"""A choice of rows of a batch: their number B -> ascending numbers of 0 .. B - 1."""

_ROUNDS = 8
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def all_rows(count: int) -> Int64[np.ndarray, " B"]:
    """All rows of a batch of `count`."""
    return np.arange(count)


def select_rows(selection: RowSelection, count: int) -> Int64[np.ndarray, " W"]:
    """`selection(count)`; raises `ConfigError` unless it ascends within 0 .. count - 1."""
    selected = np.asarray(selection(count), np.int64)
    if np.any(np.diff(selected, prepend=-1, append=count) < 1):
        raise ConfigError(
            f"rows of a batch of {count} must be ascending numbers 0 to {count - 1}, got "
            f"{selected.tolist()}"
        )
    return selected


def check_seed(seed: int) -> None:
    """Raises `ConfigError` unless `seed` is 0 to 2^64 - 1."""
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed must be 0 to 2^64 - 1, got {seed}")


def check_step(step: int) -> None:
    """Raises `ConfigError` for a negative `step`."""
    if step < 0:
        raise ConfigError(f"step must be 0 or more, got {step}")


def check_positive(**settings: int) -> None:
    """Raises `ConfigError` naming the first of `settings` that is below 1."""
    for name, value in settings.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def random_bits(seed: int, number: int, purpose: int, count: int) -> UInt64[np.ndarray, " count"]:
    """Random numbers that are the same for (seed, number, purpose) in all versions of numpy."""
    key = np.array([seed, number], np.uint64)
    return np.random.Philox(key=key, counter=[0, 0, 0, purpose]).random_raw(count)


def permute(
    places: Int64[np.ndarray, " W"], n: int, keys: UInt64[np.ndarray, " rounds"]
) -> Int64[np.ndarray, " W"]:
    """The numbers at `places` (0 .. n - 1) of a random order of 0 .. n - 1.

    A Feistel network over a rectangle of at least n cells. It is applied again until the result
    is below n (Black and Rogaway 2002, section 5), so every number has exactly one place, and no
    table is held in memory. `keys` choose the order.
    """
    height = isqrt(n - 1) + 1
    width = -(-n // height)
    out = _scramble(places.astype(np.uint64), height, width, keys)
    while np.any(outside := out >= n):
        out[outside] = _scramble(out[outside], height, width, keys)
    return out.astype(np.int64)


class ShuffledWindows:
    """`total` items cut into windows of `length`; a step takes `batch_size` windows.

    Each item is in exactly one window of an epoch. The position of the first cut and the order of
    the windows are drawn from (seed, epoch). The first and the last window may be shorter, and the
    last step of an epoch is filled up with empty windows.
    """

    def __init__(self, total: int, length: int, batch_size: int, seed: int) -> None:
        check_seed(seed)
        self.total: int = total
        self.length: int = length
        self.batch_size: int = batch_size
        self.seed: int = seed
        self.count: int = -(-(total + length - 1) // length)  # enough for every first cut
        self.steps_per_epoch: int = -(-self.count // batch_size)

    def at(
        self, step: int, rows: Int64[np.ndarray, " W"]
    ) -> tuple[Int64[np.ndarray, " W"], Int64[np.ndarray, " W"]]:
        """First item and number of items of the windows in the `rows` of `step`."""
        check_step(step)
        epoch, place = divmod(int(step), self.steps_per_epoch)
        phase, *keys = random_bits(self.seed, epoch, 0, 1 + _ROUNDS)
        places = place * self.batch_size + rows
        there = places < self.count
        numbers = permute(places[there], self.count, np.array(keys))
        begins = numbers * self.length - int(phase) % self.length
        starts, stops = np.zeros((2, len(rows)), np.int64)
        starts[there] = np.clip(begins, 0, self.total)
        stops[there] = np.clip(begins + self.length, 0, self.total)
        return starts, stops - starts


def _scramble(x: np.ndarray, height: int, width: int, keys: np.ndarray) -> np.ndarray:
    """One pass of the network: row and column, in turn, move by a hash of the other."""
    rows, columns = np.uint64(height), np.uint64(width)
    row: np.ndarray = x // columns
    column: np.ndarray = x % columns
    for i in range(0, len(keys), 2):
        row = (row + _hash(column, keys[i]) % rows) % rows
        column = (column + _hash(row, keys[i + 1]) % columns) % columns
    return row * columns + column


def _hash(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014) of x + key; arithmetic is modulo 2^64."""
    x = x + np.full_like(x, key)
    x = (x ^ (x >> np.uint64(30))) * _MIXERS[0]
    x = (x ^ (x >> np.uint64(27))) * _MIXERS[1]
    return x ^ (x >> np.uint64(31))
