"""Documents in a row, cut into batches of one length; a batch is a function of (seed, step)."""

import hashlib
from collections.abc import Iterator
from math import isqrt

import numpy as np
from jaxtyping import Bool, Int64, UInt64

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data.batches import (
    RowSelection,
    StreamBatch,
    all_rows,
    check_at_least,
    check_seed,
    select_rows,
)
from jaxformer.text.data.tokens import Tokens

_ROUNDS = 8
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Stream:
    """Batches of `batch_size` rows of `seq_len` tokens; each label counts once in an epoch.

    The documents of `tokens` follow each other and are cut into windows of `seq_len` labels. The
    position of the first cut and the order of the windows change with the epoch; neither the ids
    nor the order is held in memory. With `isolate_documents` a token sees and predicts only its
    own document, and the first token of a document is no label; where `tokens.document_id`
    separates documents, this id is the last label of a document and the first token of the next.
    Otherwise all is one text. Raises `DataError` for a corpus shorter than one context (seq_len + 1
    ids).

    Attributes: `tokens`; `batch_size`; `steps_per_epoch`.

    >>> text = Tokens.from_lists([list(range(25))])
    >>> stream = jf.Stream(text, batch_size=2, seq_len=4, seed=0, isolate_documents=False)
    >>> tokens = stream.batch(0).tokens
    >>> tokens.shape, (tokens[:, 1:] - tokens[:, :-1]).tolist()  # the label of a token is the next
    ((2, 5), [[1, 1, 1, 1], [1, 1, 1, 1]])
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        isolate_documents: bool,
    ) -> None:
        check_at_least(1, batch_size=batch_size, seq_len=seq_len)
        check_context(tokens, seq_len + 1, f"seq_len {seq_len} and the label after it")
        self.tokens = tokens
        self.batch_size = batch_size
        self._windows = ShuffledWindows(len(tokens.ids) - 1, seq_len, batch_size, seed)
        self._isolate_documents = isolate_documents
        self.steps_per_epoch: int = self._windows.steps_per_epoch

    @property
    def rows_per_epoch(self) -> int:
        """The rows of an epoch, without the empty ones that fill up its last batch."""
        return self._windows.count

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: ids, documents, shape and seed."""
        cut = self._windows
        values = (
            self.tokens.fingerprint,
            cut.batch_size,
            cut.length,
            cut.seed,
            self._isolate_documents,
        )
        return hashlib.sha256(repr(values).encode()).hexdigest()

    def batch(self, step: int, rows: RowSelection = all_rows) -> StreamBatch:
        """The batch of `step` (0, 1, ..); it does not depend on which batches were made before.

        Epoch e has the steps from e * steps_per_epoch on. Its last batch is filled up with rows in
        which no label counts. Only the rows that `rows` selects are read and returned.
        """
        selected = select_rows(rows, self._windows.batch_size)
        starts, sizes = self._windows.at(step, selected)
        length = self._windows.length
        batch = _make_rows(self.tokens, starts, sizes, length, self._isolate_documents)
        return batch._replace(example_ids=selected.astype(np.int32))


def iterate_once(
    tokens: Tokens,
    *,
    batch_size: int,
    seq_len: int,
    stride: int | None = None,
    isolate_documents: bool,
) -> Iterator[StreamBatch]:
    """The whole stream in order; each label counts exactly once.

    Windows of `seq_len` tokens start `stride` (default: `seq_len`) apart. With a smaller stride
    each label, except those near the start, has at least seq_len - stride tokens before it. The
    last row and the last batch are filled up. Raises `ConfigError` for a stride outside 1 to
    seq_len, `DataError` for fewer than two ids.
    """
    stride = seq_len if stride is None else stride
    check_at_least(1, batch_size=batch_size, seq_len=seq_len)
    if not 1 <= stride <= seq_len:
        raise ConfigError(f"stride must be 1 to seq_len ({seq_len}), got {stride}")
    check_context(tokens, 2, "a token and the label after it")
    total = len(tokens.ids) - 1
    count = 1 + max(0, -(-(total - seq_len) // stride))
    for first in range(0, count, batch_size):
        starts = np.arange(first, first + batch_size) * stride
        sizes = np.clip(total - starts, 0, seq_len)
        # All rows but the first repeat labels of the row before, which counted there.
        repeated = np.where(starts == 0, 0, seq_len - stride)
        batch = _make_rows(tokens, starts, sizes, seq_len, isolate_documents)
        new = np.arange(seq_len) >= repeated[:, None]
        yield batch._replace(loss_mask=batch.loss_mask & new)


def check_context(tokens: Tokens, needed: int, reason: str) -> None:
    """Raises `DataError` unless `tokens` holds at least `needed` ids."""
    if len(tokens.ids) < needed:
        raise DataError(
            f"a corpus of {len(tokens.ids)} ids is smaller than one context: {needed} are needed "
            f"({reason}); give more text or a shorter context"
        )


def document_bounds(
    tokens: Tokens, places: Int64[np.ndarray, "*shape"]
) -> tuple[Int64[np.ndarray, "*shape"], Int64[np.ndarray, "*shape"]]:
    """Start and stop of the document that contains each of `places`."""
    after = np.searchsorted(tokens.offsets, places, side="right")
    return tokens.offsets[after - 1], tokens.offsets[after]


def _make_rows(
    tokens: Tokens, starts: np.ndarray, sizes: np.ndarray, seq_len: int, isolate_documents: bool
) -> StreamBatch:
    """A row for each start; its first `sizes` labels count."""
    columns = np.arange(seq_len + 1, dtype=np.int32)
    counts = np.where(sizes > 0, sizes + 1, 0)
    ids = tokens.rows(starts, counts, seq_len + 1)
    inside = columns < counts[:, None]
    example_ids = np.arange(len(starts), dtype=np.int32)
    if not isolate_documents:
        return StreamBatch(ids, inside[:, 1:], example_ids)
    if tokens.document_id is None:
        begins = _document_begins(tokens, starts, counts, seq_len + 1)
        is_label = inside[:, 1:] & ~begins[:, 1:]
    else:  # the separator is the last label of a document, and the first input of the next
        begins = ids == tokens.document_id
        is_label = inside[:, 1:]
    begins[:, 0] = True
    segments = np.cumsum(begins, axis=1, dtype=np.int32)
    positions = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    if np.any(counts <= seq_len):
        segments[~inside] = 0
        positions[~inside] = 0
    return StreamBatch(ids, is_label, example_ids, segments, positions)


def _document_begins(
    tokens: Tokens, starts: np.ndarray, counts: np.ndarray, length: int
) -> Bool[np.ndarray, "B length"]:
    """True where a sequence of `tokens` begins, for rows of `counts` ids from `starts` on."""
    begins = np.zeros((len(starts), length), bool)
    first = np.searchsorted(tokens.offsets, starts, side="left")
    last = np.searchsorted(tokens.offsets, starts + counts, side="left")
    for row, start, low, high in zip(begins, starts, first.tolist(), last.tolist(), strict=True):
        row[tokens.offsets[low:high] - start] = True
    return begins


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
        check_at_least(0, step=int(step))
        epoch, index = divmod(int(step), self.steps_per_epoch)
        phase, *keys = random_bits(self.seed, epoch, 0, 1 + _ROUNDS)
        places = index * self.batch_size + rows
        there = places < self.count
        numbers = permute(places[there], self.count, np.array(keys))
        begins = numbers * self.length - int(phase) % self.length
        starts, stops = np.zeros((2, len(rows)), np.int64)
        starts[there] = np.clip(begins, 0, self.total)
        stops[there] = np.clip(begins + self.length, 0, self.total)
        return starts, stops - starts


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
