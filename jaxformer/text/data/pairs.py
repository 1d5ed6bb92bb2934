"""Pairs of sentences to batches of a few fixed shapes; a batch is a function of (seed, step)."""

import hashlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxformer.errors import DataError
from jaxformer.text.data.batches import (
    PairBatch,
    RowSelection,
    all_rows,
    check_at_least,
    check_seed,
    select_rows,
)
from jaxformer.text.data.tokens import Tokens
from jaxformer.text.tokenizers import BOS, EOS, PAD


class Bucket(NamedTuple):
    """One shape of batch."""

    source_length: int
    """S, `<eos>` included."""
    target_length: int
    """T, `<eos>` included."""
    batch_size: int
    """B."""


class PairIds(NamedTuple):
    """The special ids of a batch of pairs."""

    pad: int = PAD
    """Fills up the rows."""
    bos: int = BOS
    """Stands before each target."""
    eos: int | None = EOS
    """Is written after both sides; None: the sequences have the ids that end them."""

    @property
    def added(self) -> int:
        """The ids that a batch adds to the end of a sequence."""
        return 0 if self.eos is None else 1


_TRAINED_HERE = PairIds()


class PairBatches:
    """Batches of sentence pairs; each kept pair occurs once in an epoch. Made by `bucket_pairs`.

    `pairs` [N] are the numbers of the kept pairs; each goes to the first bucket that it fits in.
    The last batch of a bucket is filled up with empty rows.

    Attributes: `source`, `target`; `buckets`; `pairs`; `dropped`, the number of pairs left out by
    reason; `seed`; `steps_per_epoch`.
    """

    def __init__(
        self,
        sides: tuple[Tokens, Tokens],
        pairs: Int[np.ndarray, " N"],
        buckets: tuple[Bucket, ...],
        *,
        seed: int,
        dropped: dict[str, int],
        special: PairIds = _TRAINED_HERE,
    ) -> None:
        check_seed(seed)
        self.source: Tokens = sides[0]
        self.target: Tokens = sides[1]
        self.buckets = buckets
        self.seed = seed
        self.dropped = dropped
        self.special = special
        added = special.added
        source_lengths, self._target_lengths = (side.lengths[pairs] + added for side in sides)
        chosen = _choose(source_lengths, self._target_lengths, buckets)
        order = np.argsort(chosen, kind="stable")
        self.pairs: np.ndarray = pairs[order]
        self._bounds = np.searchsorted(chosen[order], np.arange(len(buckets) + 1))
        self._plan = _plan_batches(self._bounds, buckets)
        self.steps_per_epoch: int = len(self._plan)
        self._epoch = (-1, np.zeros(0, np.int64), np.zeros(0, np.int64))

    @property
    def padding_share(self) -> float:
        """The share of target positions [B, T], empty rows included, that hold no token."""
        used = [self.buckets[bucket] for bucket, _, _ in self._plan]
        positions = sum(bucket.batch_size * bucket.target_length for bucket in used)
        return 1 - int(self._target_lengths.sum()) / positions

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: ids, kept pairs, buckets and seed."""
        values: tuple = (self.source.fingerprint, self.target.fingerprint, self.seed, self.buckets)
        if self.special != _TRAINED_HERE:
            values += self.special
        digest = hashlib.sha256(repr(values).encode())
        digest.update(self.pairs.astype("<i8").tobytes())
        return digest.hexdigest()

    def batch(self, step: int, rows: RowSelection = all_rows) -> PairBatch:
        """The batch of `step` (0, 1, ..); it does not depend on which batches were made before.

        The order of the pairs in a bucket and of the batches in an epoch is drawn from (seed,
        epoch), where epoch = step // steps_per_epoch. Only the rows that `rows` selects are read
        and returned.
        """
        check_at_least(0, step=int(step))
        epoch, index = divmod(int(step), self.steps_per_epoch)
        pairs, batches = self._order(epoch)
        bucket, start, stop = self._plan[batches[index]]
        source_length, target_length, batch_size = self.buckets[bucket]
        row = select_rows(rows, batch_size)
        pairs = pairs[start:stop]
        pairs = pairs[row[row < len(pairs)]]  # rows after the last pair are empty
        pad, bos, eos = self.special
        source = np.full((len(row), source_length), pad, np.int32)
        target = np.full((len(row), target_length + 1), pad, np.int32)
        _fill(source, self.source, pairs, eos)
        _fill(target[:, 1:], self.target, pairs, eos)
        target[: len(pairs), 0] = bos
        return PairBatch(source, target, row.astype(np.int32))

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shuffled pairs and the order of the batches."""
        cached, pairs, batches = self._epoch
        if cached == epoch:
            return pairs, batches
        bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
        parts = [
            start + _permutation(bits, stop - start)
            for start, stop in zip(self._bounds[:-1], self._bounds[1:], strict=True)
        ]
        pairs = self.pairs[np.concatenate(parts)]
        batches = _permutation(bits, self.steps_per_epoch)
        self._epoch = (epoch, pairs, batches)  # one assignment: threads can share it
        return pairs, batches


def bucket_pairs(
    source: Tokens,
    target: Tokens,
    *,
    seed: int,
    batch_tokens: int,
    buckets: int,
    max_len: int,
    pad_to_multiple: int = 8,
    batch_size_multiple: int = 8,
    special: PairIds = _TRAINED_HERE,
) -> PairBatches:
    """Batches of all pairs with 1 to max_len ids on each side, `<eos>` included.

    `special` are the ids of the model's vocabulary; the default fits tokenizers trained here.
    `batch_tokens` is the number of target positions of a batch, `buckets` the greatest number of
    shapes; for `pad_to_multiple` and `batch_size_multiple` see `plan_buckets`. Other pairs are
    left out and counted in `.dropped` ("empty", "too_long"). Raises `DataError` when the sides
    differ in number or no pair is left.

    >>> sentences = Tokens.from_lists([[5] * 7] * 64 + [[5] * 31] * 16)
    >>> batches = jf.bucket_pairs(
    ...     sentences, sentences, seed=0, batch_tokens=256, buckets=2, max_len=50
    ... )
    >>> [tuple(bucket) for bucket in batches.buckets]  # S and T with EOS, and B = 256 / T
    [(8, 8, 32), (32, 32, 8)]
    >>> batches.steps_per_epoch  # 64 / 32 + 16 / 8
    4
    """
    if len(source) != len(target):
        raise DataError(
            f"{len(source)} source and {len(target)} target sentences: "
            "sentence i of one must translate sentence i of the other"
        )
    lengths = source.lengths + special.added, target.lengths + special.added
    empty = np.minimum(source.lengths, target.lengths) == 0
    too_long = ~empty & (np.maximum(*lengths) > max_len)
    dropped = {"empty": int(empty.sum()), "too_long": int(too_long.sum())}
    pairs = np.flatnonzero(~(empty | too_long))
    if len(pairs) == 0:
        raise DataError(
            f"none of {len(empty)} pairs is left: {dropped['empty']} with an empty side, "
            f"{dropped['too_long']} longer than max_len {max_len} (<eos> included)"
        )
    plan = plan_buckets(
        lengths[0][pairs],
        lengths[1][pairs],
        batch_tokens=batch_tokens,
        buckets=buckets,
        pad_to_multiple=pad_to_multiple,
        batch_size_multiple=batch_size_multiple,
        max_len=max_len,
    )
    return PairBatches((source, target), pairs, plan, seed=seed, dropped=dropped, special=special)


def plan_buckets(
    source_lengths: Int[np.ndarray, " N"],
    target_lengths: Int[np.ndarray, " N"],
    *,
    batch_tokens: int,
    buckets: int,
    pad_to_multiple: int = 8,
    batch_size_multiple: int = 8,
    max_len: int | None = None,
) -> tuple[Bucket, ...]:
    """At most `buckets` shapes, short to long, with the fewest positions B (S + T) in an epoch.

    Lengths include `<eos>`. Dynamic programming finds the cheapest ranges of max(source, target),
    cut at multiples of `pad_to_multiple`; empty rows of last batches count. S and T of a bucket
    are the lengths of its longest pairs, rounded up to `pad_to_multiple`, but at most `max_len`,
    because learned positions end there. Its B is batch_tokens // T, rounded down to a multiple of
    `batch_size_multiple`, at least one such multiple. Raises `ConfigError` for a setting below 1,
    `DataError` for no pairs.
    """
    source, target = np.asarray(source_lengths), np.asarray(target_lengths)
    if source.shape != target.shape or source.size == 0:
        raise DataError(f"buckets need pairs: got {source.size} and {target.size} lengths")
    check_at_least(
        1,
        batch_tokens=batch_tokens,
        buckets=buckets,
        pad_to_multiple=pad_to_multiple,
        batch_size_multiple=batch_size_multiple,
    )
    longer = np.maximum(source, target)
    cells, cell = np.unique(-(-longer // pad_to_multiple), return_inverse=True)
    longest = np.zeros((2, len(cells)), np.int64)
    np.maximum.at(longest[0], cell, source)
    np.maximum.at(longest[1], cell, target)
    before = np.concatenate([[0], np.cumsum(np.bincount(cell))])
    limit = int(longest.max()) + pad_to_multiple if max_len is None else max_len
    shapes = _Shapes(longest, before, batch_tokens, pad_to_multiple, batch_size_multiple, limit)
    costs = [shapes.positions(stop) for stop in range(1, len(cells) + 1)]
    cuts = _cheapest_cuts(costs, buckets)
    return tuple(Bucket(*shapes.ending(stop)[:, start].tolist()) for start, stop in cuts)


class _Shapes(NamedTuple):
    """The shapes of buckets of neighbouring cells; a cell holds the pairs of one rounded length."""

    longest: np.ndarray  # [2, cells]: the longest source and target of each cell
    before: np.ndarray  # [cells + 1]: pairs before each cell
    batch_tokens: int
    pad_to_multiple: int
    batch_size_multiple: int
    limit: int

    def ending(self, stop: int) -> np.ndarray:
        """[3, stop]: S, T and B of the bucket of cells start .. stop - 1, for every start."""
        longest = np.maximum.accumulate(self.longest[:, :stop][:, ::-1], axis=1)[:, ::-1]
        rounded = -(-longest // self.pad_to_multiple) * self.pad_to_multiple
        sizes = np.minimum(rounded, np.maximum(self.limit, longest))
        multiples = np.maximum(self.batch_tokens // sizes[1] // self.batch_size_multiple, 1)
        rows = multiples * self.batch_size_multiple
        return np.stack([*sizes, rows])

    def positions(self, stop: int) -> np.ndarray:
        """[stop]: source and target positions of all batches of the bucket, for every start."""
        source, target, rows = self.ending(stop)
        batches = -(-(self.before[stop] - self.before[:stop]) // rows)
        return batches * rows * (source + target)


def _cheapest_cuts(costs: list[np.ndarray], count: int) -> list[tuple[int, int]]:
    """At most `count` ranges (start, stop) that cover 0 .. n with the least sum of costs.

    costs[stop - 1][start] is the cost of one range. Among equal sums the one with fewer ranges
    wins.
    """
    n = len(costs)
    best = [np.array([0.0] + [np.inf] * n)]
    starts = []
    for _ in range(min(count, n)):
        sums = [best[-1][:stop] + costs[stop - 1] for stop in range(1, n + 1)]
        starts.append([int(np.argmin(row)) for row in sums])
        best.append(np.array([np.inf] + [row.min() for row in sums]))
    used = 1 + int(np.argmin([row[n] for row in best[1:]]))
    cuts, stop = [], n
    for level in range(used - 1, -1, -1):
        start = starts[level][stop - 1]
        cuts.append((start, stop))
        stop = start
    return cuts[::-1]


def _choose(source: np.ndarray, target: np.ndarray, buckets: tuple[Bucket, ...]) -> np.ndarray:
    """[N] the first bucket that each pair fits in."""
    longest = np.array(buckets).T[:2, :, None]
    fits = (source <= longest[0]) & (target <= longest[1])
    if not fits.any(axis=0).all():
        bad = int(np.argmin(fits.any(axis=0)))
        raise DataError(
            f"no bucket is long enough for a pair of lengths {source[bad]} and {target[bad]}"
        )
    return fits.argmax(axis=0)


def _plan_batches(bounds: np.ndarray, buckets: tuple[Bucket, ...]) -> list[tuple[int, int, int]]:
    """(bucket, start, stop) of every batch; start and stop count pairs in order of buckets."""
    return [
        (i, int(start), int(min(start + bucket.batch_size, bounds[i + 1])))
        for i, bucket in enumerate(buckets)
        for start in range(bounds[i], bounds[i + 1], bucket.batch_size)
    ]


def _permutation(bits: np.random.Philox, n: int) -> np.ndarray:
    """0 .. n - 1 in random order; all versions of numpy give the same raw bits, sorted here."""
    return np.argsort(bits.random_raw(n), kind="stable")


def _fill(out: np.ndarray, tokens: Tokens, pairs: np.ndarray, eos: int | None) -> None:
    """Writes the ids of `pairs` and `eos`, if any, into the first rows of `out` [B, L]."""
    starts = tokens.offsets[pairs]
    lengths = tokens.offsets[pairs + 1] - starts
    columns = np.arange(out.shape[1])
    inside = columns < lengths[:, None]
    out[: len(pairs)][inside] = tokens.take((starts[:, None] + columns)[inside])
    if eos is not None:
        out[np.arange(len(pairs)), lengths] = eos
