"""Pairs of sentences to batches of a few fixed shapes, each a pure function of (seed, step)."""

import hashlib
from typing import NamedTuple

import numpy as np

from jaxformer.data.order import Rows, at_least_one, check_seed, check_step, every_row, wanted
from jaxformer.data.tokens import Tokens
from jaxformer.tokenizers import BOS, EOS, PAD, DataError


class PairBatch(NamedTuple):
    """B pairs of sentences; a row that is all `<pad>` on both sides holds no pair.

    source: [B, S] int32, x1 .. xn <eos> <pad> ..
    target: [B, T + 1] int32, <bos> y1 .. ym <eos> <pad> ..
    row: [B] int32, the global row numbers.
    """

    source: np.ndarray
    target: np.ndarray
    row: np.ndarray


class Bucket(NamedTuple):
    """One shape of batch: S and T positions (`<eos>` included) and B rows."""

    source_length: int
    target_length: int
    rows: int


class PairBatches:
    """Batches of sentence pairs: in an epoch every kept pair occurs exactly once.

    `pairs` [N] are the numbers of the kept pairs; each goes to the first bucket that holds it.
    The last batch of a bucket is filled up with empty rows. Made by `bucket_pairs`.

    Attributes: `buckets`; `pairs`; `dropped`, counts by reason; `seed`; `steps_per_epoch`.
    """

    def __init__(
        self,
        sides: tuple[Tokens, Tokens],
        pairs: np.ndarray,
        buckets: tuple[Bucket, ...],
        *,
        seed: int,
        dropped: dict[str, int],
    ) -> None:
        check_seed(seed)
        self.source, self.target = sides
        self.buckets = buckets
        self.seed = seed
        self.dropped = dropped
        self._target_lengths = self.target.lengths[pairs] + 1
        chosen = _choose(self.source.lengths[pairs] + 1, self._target_lengths, buckets)
        order = np.argsort(chosen, kind="stable")
        self.pairs = pairs[order]
        self._bounds = np.searchsorted(chosen[order], np.arange(len(buckets) + 1))
        self._plan = _plan_batches(self._bounds, buckets)
        self.steps_per_epoch = len(self._plan)
        self._epoch = (-1, self.pairs, np.arange(self.steps_per_epoch))

    @property
    def padding_share(self) -> float:
        """The share of target positions [B, T], empty rows included, that hold no token."""
        positions = sum(
            self.buckets[b].rows * self.buckets[b].target_length for b, _, _ in self._plan
        )
        return 1 - int(self._target_lengths.sum()) / positions

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: ids, kept pairs, buckets and seed."""
        facts = (self.source.fingerprint, self.target.fingerprint, self.seed, self.buckets)
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(self.pairs.astype("<i8").tobytes())
        return digest.hexdigest()

    def batch(self, step: int, rows: Rows = every_row) -> PairBatch:
        """The batch of `step` (0, 1, ..), the same whenever and in whatever order it is asked for.

        Pairs within a bucket and batches within an epoch stand in an order drawn from (seed,
        epoch), where epoch = step // steps_per_epoch. Only the `rows` wanted of it are read and
        returned.
        """
        check_step(step)
        epoch, place = divmod(int(step), self.steps_per_epoch)
        pairs, batches = self._order(epoch)
        bucket, start, stop = self._plan[batches[place]]
        return self._gather(pairs[start:stop], wanted(rows, self.buckets[bucket].rows), bucket)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs, shuffled within their buckets, and the order of the batches."""
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
        self._epoch = (epoch, pairs, batches)  # one assignment, so that threads may share it
        return pairs, batches

    def _gather(self, pairs: np.ndarray, row: np.ndarray, bucket: int) -> PairBatch:
        """The rows `row` of the batch of `pairs`, whose last rows hold none."""
        source_length, target_length, _ = self.buckets[bucket]
        pairs = pairs[row[row < len(pairs)]]
        source = np.full((len(row), source_length), PAD, np.int32)
        target = np.full((len(row), target_length + 1), PAD, np.int32)
        _fill(source, self.source, pairs)
        _fill(target[:, 1:], self.target, pairs)
        target[: len(pairs), 0] = BOS
        return PairBatch(source, target, row.astype(np.int32))


def bucket_pairs(
    source: Tokens,
    target: Tokens,
    *,
    seed: int,
    tokens: int,
    buckets: int,
    max_len: int,
    multiple: int = 8,
    rows_multiple: int = 8,
) -> PairBatches:
    """Batches of all pairs with 1 to max_len - 1 ids on each side (`<eos>` makes max_len).

    `tokens`: target positions a batch; `buckets`: at most so many shapes; `multiple` and
    `rows_multiple` as in `plan_buckets`. Other pairs are left out and counted in `.dropped`
    ("empty", "too_long"). Raises `DataError` when the sides differ in number or no pair is left.
    """
    if len(source) != len(target):
        raise DataError(
            f"{len(source)} source and {len(target)} target sentences: "
            "sentence i of one must translate sentence i of the other"
        )
    lengths = source.lengths + 1, target.lengths + 1
    empty = np.minimum(*lengths) == 1
    too_long = ~empty & (np.maximum(*lengths) > max_len)
    dropped = {"empty": int(empty.sum()), "too_long": int(too_long.sum())}
    pairs = np.flatnonzero(~(empty | too_long))
    if len(pairs) == 0:
        raise DataError(
            f"none of {len(source)} pairs is left: {dropped['empty']} with an empty side, "
            f"{dropped['too_long']} longer than max_len {max_len} (<eos> included)"
        )
    kept = lengths[0][pairs], lengths[1][pairs]
    sizes = {"multiple": multiple, "rows_multiple": rows_multiple, "max_len": max_len}
    plan = plan_buckets(*kept, tokens=tokens, count=buckets, **sizes)
    return PairBatches((source, target), pairs, plan, seed=seed, dropped=dropped)


def plan_buckets(
    source_lengths: np.ndarray,
    target_lengths: np.ndarray,
    *,
    tokens: int,
    count: int,
    multiple: int = 8,
    rows_multiple: int = 8,
    max_len: int | None = None,
) -> tuple[Bucket, ...]:
    """At most `count` shapes, short to long, with the fewest positions B (S + T) in an epoch.

    Lengths [N] include `<eos>`. Pairs are cut into ranges of max(source, target) at multiples of
    `multiple`, found by dynamic programming; empty rows of last batches count. A bucket's S and
    T are the longest of its pairs, rounded up to `multiple` (but not above `max_len`, so that
    learned positions suffice); its rows are tokens // T, rounded down to `rows_multiple`, at
    least `rows_multiple`. Raises `ConfigError` for a setting below 1, `DataError` for no pairs.
    """
    source, target = np.asarray(source_lengths), np.asarray(target_lengths)
    if source.shape != target.shape or source.size == 0:
        raise DataError(f"buckets need pairs: got {source.size} and {target.size} lengths")
    settings = {"tokens": tokens, "count": count, "multiple": multiple}
    at_least_one(settings | {"rows_multiple": rows_multiple})
    cells, cell = np.unique(-(-np.maximum(source, target) // multiple), return_inverse=True)
    longest = np.zeros((2, len(cells)), np.int64)
    np.maximum.at(longest[0], cell, source)
    np.maximum.at(longest[1], cell, target)
    before = np.concatenate([[0], np.cumsum(np.bincount(cell))])
    limit = int(longest.max()) + multiple if max_len is None else max_len
    shapes = _Shapes(longest, before, tokens, multiple, rows_multiple, limit)
    costs = [shapes.positions(stop) for stop in range(1, len(cells) + 1)]
    cuts = _cheapest_cuts(costs, count)
    return tuple(Bucket(*shapes.ending(stop)[:, start].tolist()) for start, stop in cuts)


class _Shapes(NamedTuple):
    """The shape that a bucket gets when it takes the pairs of neighbouring cells of length."""

    longest: np.ndarray  # [2, cells]: the longest source and target of each cell
    before: np.ndarray  # [cells + 1]: pairs before each cell
    tokens: int
    multiple: int
    rows_multiple: int
    limit: int

    def ending(self, stop: int) -> np.ndarray:
        """[3, stop]: S, T and B of the bucket of cells start .. stop - 1, for every start."""
        longest = np.maximum.accumulate(self.longest[:, :stop][:, ::-1], axis=1)[:, ::-1]
        rounded = -(-longest // self.multiple) * self.multiple
        sizes = np.minimum(rounded, np.maximum(self.limit, longest))
        rows = np.maximum(self.tokens // sizes[1] // self.rows_multiple, 1) * self.rows_multiple
        return np.stack([*sizes, rows])

    def positions(self, stop: int) -> np.ndarray:
        """[stop]: source and target positions of all batches of the bucket, for every start."""
        source, target, rows = self.ending(stop)
        batches = -(-(self.before[stop] - self.before[:stop]) // rows)
        return batches * rows * (source + target)


def _cheapest_cuts(costs: list[np.ndarray], count: int) -> list[tuple[int, int]]:
    """At most `count` ranges (start, stop) covering 0 .. n, least in their sum of costs.

    costs[stop - 1][start] is the cost of one range. Among equals the fewest ranges win.
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
    """[N] the first bucket that holds each pair."""
    chosen = np.full(len(source), len(buckets))
    for i in range(len(buckets) - 1, -1, -1):
        fits = (source <= buckets[i].source_length) & (target <= buckets[i].target_length)
        chosen[fits] = i
    if np.any(chosen == len(buckets)):
        bad = int(np.argmax(chosen))
        raise DataError(f"no bucket holds a pair of lengths {source[bad]} and {target[bad]}")
    return chosen


def _plan_batches(bounds: np.ndarray, buckets: tuple[Bucket, ...]) -> list[tuple[int, int, int]]:
    """(bucket, start, stop) of every batch; start and stop count pairs in order of buckets."""
    return [
        (i, int(start), int(min(start + bucket.rows, bounds[i + 1])))
        for i, bucket in enumerate(buckets)
        for start in range(bounds[i], bounds[i + 1], bucket.rows)
    ]


def _permutation(bits: np.random.Philox, n: int) -> np.ndarray:
    """0 .. n - 1 in random order, by sorting raw bits: numpy promises these for all versions."""
    return np.argsort(bits.random_raw(n), kind="stable")


def _fill(out: np.ndarray, tokens: Tokens, pairs: np.ndarray) -> None:
    """Writes the ids of `pairs` and `<eos>` into the first rows of `out` [B, L]."""
    starts = tokens.offsets[pairs]
    lengths = tokens.offsets[pairs + 1] - starts
    columns = np.arange(out.shape[1])
    inside = columns < lengths[:, None]
    out[: len(pairs)][inside] = tokens.ids[(starts[:, None] + columns)[inside]]
    out[np.arange(len(pairs)), lengths] = EOS
