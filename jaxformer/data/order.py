"""What is drawn from a seed, and windows over a corpus visited in an order that needs no memory."""

from collections.abc import Callable
from math import isqrt

import numpy as np

from jaxformer.config import ConfigError

Rows = Callable[[int], np.ndarray]
"""Which rows of a batch of B are wanted: ascending numbers of 0 .. B - 1."""

_ROUNDS = 8
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def every_row(count: int) -> np.ndarray:
    """All rows of a batch of `count`."""
    return np.arange(count)


def wanted(rows: Rows, count: int) -> np.ndarray:
    """[W] int64 `rows(count)`; raises `ConfigError` unless they ascend within 0 .. count - 1."""
    found = np.asarray(rows(count), np.int64)
    if np.any(np.diff(found, prepend=-1, append=count) < 1):
        raise ConfigError(
            f"rows of a batch of {count} must be ascending numbers 0 to {count - 1}, got "
            f"{found.tolist()}"
        )
    return found


def check_seed(seed: int) -> None:
    """Raises `ConfigError` unless `seed` is 0 to 2^64 - 1."""
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed must be 0 to 2^64 - 1, got {seed}")


def check_step(step: int) -> None:
    """Raises `ConfigError` for a negative `step`."""
    if step < 0:
        raise ConfigError(f"step must be 0 or more, got {step}")


def at_least_one(settings: dict[str, int]) -> None:
    """Raises `ConfigError` naming the first of `settings` that is below 1."""
    for name, value in settings.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")


def draw(seed: int, number: int, purpose: int, count: int) -> np.ndarray:
    """[count] uint64, the same for the same (seed, number, purpose) in all versions of numpy."""
    key = np.array([seed, number], np.uint64)
    return np.random.Philox(key=key, counter=[0, 0, 0, purpose]).random_raw(count)


def shuffled(places: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """What stands at `places` (0 .. n - 1, int64) of a random order of 0 .. n - 1.

    A Feistel network over a rectangle of at least n cells, walked along its cycle until the
    result is below n (Black and Rogaway 2002, section 5): every number has exactly one place, and
    no table is held. `keys` [rounds] uint64 choose the order.
    """
    height = isqrt(n - 1) + 1
    width = -(-n // height)
    out = _scramble(places.astype(np.uint64), height, width, keys)
    while np.any(outside := out >= n):
        out[outside] = _scramble(out[outside], height, width, keys)
    return out.astype(np.int64)


class Windows:
    """`total` items cut into windows of `length`, `rows` of them a step.

    In an epoch every item lies in exactly one window. The cuts start at a phase, and the windows
    stand in an order, both drawn from (seed, epoch); the first and the last window are cut short,
    and the last step is filled up with empty ones.
    """

    def __init__(self, total: int, length: int, rows: int, seed: int) -> None:
        check_seed(seed)
        self.total, self.length, self.rows, self.seed = total, length, rows, seed
        self.count = -(-(total + length - 1) // length)  # so many suffice for every phase
        self.steps_per_epoch = -(-self.count // rows)

    def at(self, step: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First item and number of items [W] int64 of the windows `rows` [W] of `step`."""
        check_step(step)
        epoch, place = divmod(int(step), self.steps_per_epoch)
        phase, *keys = draw(self.seed, epoch, 0, 1 + _ROUNDS)
        places = place * self.rows + rows
        there = places < self.count
        numbers = shuffled(places[there], self.count, np.array(keys))
        begins = numbers * self.length - int(phase) % self.length
        starts, stops = np.zeros((2, len(rows)), np.int64)
        starts[there] = np.clip(begins, 0, self.total)
        stops[there] = np.clip(begins + self.length, 0, self.total)
        return starts, stops - starts


def _scramble(x: np.ndarray, height: int, width: int, keys: np.ndarray) -> np.ndarray:
    """One pass of the network: row and column, in turn, move by a hash of the other."""
    height, width = np.uint64(height), np.uint64(width)
    row, column = x // width, x % width
    for i in range(0, len(keys), 2):
        row = (row + _hash(column, keys[i]) % height) % height
        column = (column + _hash(row, keys[i + 1]) % width) % width
    return row * width + column


def _hash(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al. 2014) of x + key; arithmetic is modulo 2^64."""
    x = x + np.full_like(x, key)
    x = (x ^ (x >> np.uint64(30))) * _MIXERS[0]
    x = (x ^ (x >> np.uint64(27))) * _MIXERS[1]
    return x ^ (x >> np.uint64(31))
