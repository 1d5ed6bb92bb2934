"""A stream of documents to rows of one length, each batch a pure function of (seed, step)."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.data.order import Rows, Windows, at_least_one, every_row, wanted
from jaxformer.data.tokens import Tokens
from jaxformer.tokenizers import DataError


class StreamBatch(NamedTuple):
    """B rows of T tokens, each with the token after it: labels are `tokens[:, 1:]`.

    tokens: [B, T + 1] int32; beyond the text they are 0.
    valid: [B, T] bool, which labels count.
    row: [B] int32, the global row numbers.
    segments: [B, T + 1] int32, the documents of a row numbered from 1, 0 beyond the text; None
        where documents are not kept apart.
    positions: [B, T + 1] int32, counted from 0 in every document of a row; None likewise.
    """

    tokens: np.ndarray
    valid: np.ndarray
    row: np.ndarray
    segments: np.ndarray | None
    positions: np.ndarray | None


class Stream:
    """Batches of `rows` rows of `length` tokens: in an epoch every label counts exactly once.

    The documents of `tokens` stand one after the other and are cut into windows of `length`
    labels, from a phase and in an order that differ from epoch to epoch; neither the ids nor the
    order is held in memory. With `separate` a token sees and predicts its own document only, and
    the first token of a document is no label; otherwise the whole is one text. Raises `DataError`
    for a corpus shorter than one context (length + 1 ids).

    Attributes: `tokens`; `steps_per_epoch`.
    """

    def __init__(
        self, tokens: Tokens, *, rows: int, length: int, seed: int, separate: bool
    ) -> None:
        at_least_one({"rows": rows, "length": length})
        check_context(tokens, length + 1, f"length {length} and the label after it")
        self.tokens = tokens
        self._windows = Windows(len(tokens.ids) - 1, length, rows, seed)
        self._separate = separate
        self.steps_per_epoch = self._windows.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: ids, borders, shape and seed."""
        cut = self._windows
        facts = (self.tokens.fingerprint, cut.rows, cut.length, cut.seed, self._separate)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def batch(self, step: int, rows: Rows = every_row) -> StreamBatch:
        """The batch of `step` (0, 1, ..), the same whenever and in whatever order it is asked for.

        Epoch e holds steps e * steps_per_epoch onwards; its last batch is filled up with rows of
        which no label counts. Only the `rows` wanted of it are read and returned.
        """
        own = wanted(rows, self._windows.rows)
        starts, sizes = self._windows.at(step, own)
        batch = _rows(self.tokens, starts, sizes, self._windows.length, self._separate)
        return batch._replace(row=own.astype(np.int32))


def cover(
    tokens: Tokens, *, rows: int, length: int, stride: int | None = None, separate: bool
) -> Iterator[StreamBatch]:
    """The whole stream in order, every label counted exactly once.

    Windows of `length` tokens start `stride` (default: `length`) apart: with a smaller one every
    label, but those near the start, has at least length - stride tokens before it. The last row
    and the last batch are filled up. Raises `ConfigError` for a stride outside 1 to length,
    `DataError` for less than two ids.
    """
    stride = length if stride is None else stride
    at_least_one({"rows": rows, "length": length})
    if not 1 <= stride <= length:
        raise ConfigError(f"stride must be 1 to length ({length}), got {stride}")
    check_context(tokens, 2, "a token and the label after it")
    total = len(tokens.ids) - 1
    count = 1 + max(0, -(-(total - length) // stride))
    for first in range(0, count, rows):
        starts = np.arange(first, first + rows) * stride
        sizes = np.clip(total - starts, 0, length)
        # All but the first row repeat, as context, what the row before has counted.
        repeated = np.where(starts == 0, 0, length - stride)
        batch = _rows(tokens, starts, sizes, length, separate)
        yield batch._replace(valid=batch.valid & (np.arange(length) >= repeated[:, None]))


def check_context(tokens: Tokens, needed: int, reason: str) -> None:
    """Raises `DataError` unless `tokens` holds at least `needed` ids."""
    if len(tokens.ids) < needed:
        raise DataError(
            f"a corpus of {len(tokens.ids)} ids is smaller than one context: {needed} are needed "
            f"({reason}); give more text or a shorter context"
        )


def _rows(
    tokens: Tokens, starts: np.ndarray, sizes: np.ndarray, length: int, separate: bool
) -> StreamBatch:
    """One row for each start, of which the first sizes[i] labels count."""
    columns = np.arange(length + 1)
    inside = (columns <= sizes[:, None]) & (sizes > 0)[:, None]
    places = np.where(inside, starts[:, None] + columns, 0)
    ids = np.where(inside, tokens.take(places), 0).astype(np.int32)
    row = np.arange(len(starts), dtype=np.int32)
    if not separate:
        return StreamBatch(ids, inside[:, 1:], row, None, None)
    begins, _ = document_bounds(tokens, places)
    new = begins[:, 1:] != begins[:, :-1]
    segments = np.cumsum(np.pad(new, ((0, 0), (1, 0)), constant_values=True), axis=1)
    positions = places - np.maximum(begins, starts[:, None])
    return StreamBatch(
        ids,
        inside[:, 1:] & ~new,
        row,
        np.where(inside, segments, 0).astype(np.int32),
        np.where(inside, positions, 0).astype(np.int32),
    )


def document_bounds(tokens: Tokens, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop of the document that each of `places` lies in, in their shape."""
    after = np.searchsorted(tokens.offsets, places, side="right")
    return tokens.offsets[after - 1], tokens.offsets[after]
