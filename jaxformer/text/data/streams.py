"""Documents in a row, cut into batches of one length; a batch is a function of (seed, step)."""

import hashlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int64

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data.batches import StreamBatch
from jaxformer.text.data.shuffle import (
    RowSelection,
    ShuffledWindows,
    all_rows,
    check_positive,
    select_rows,
)
from jaxformer.text.data.tokens import Tokens


class Stream:
    """Batches of `batch_size` rows of `seq_len` tokens; each label counts once in an epoch.

    The documents of `tokens` follow each other and are cut into windows of `seq_len` labels. The
    position of the first cut and the order of the windows change with the epoch; neither the ids
    nor the order is held in memory. With `isolate_documents` a token sees and predicts only its
    own document, and the first token of a document is no label; otherwise all is one text. Raises
    `DataError` for a corpus shorter than one context (seq_len + 1 ids).

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
        check_positive(batch_size=batch_size, seq_len=seq_len)
        check_context(tokens, seq_len + 1, f"seq_len {seq_len} and the label after it")
        self.tokens = tokens
        self.batch_size = batch_size
        self._windows = ShuffledWindows(len(tokens.ids) - 1, seq_len, batch_size, seed)
        self._isolate_documents = isolate_documents
        self.steps_per_epoch: int = self._windows.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: ids, documents, shape and seed."""
        cut = self._windows
        values = (self.tokens.fingerprint, cut.batch_size, cut.length, cut.seed)
        return hashlib.sha256(repr((*values, self._isolate_documents)).encode()).hexdigest()

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
    check_positive(batch_size=batch_size, seq_len=seq_len)
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
    columns = np.arange(seq_len + 1)
    inside = (columns <= sizes[:, None]) & (sizes > 0)[:, None]
    places = np.where(inside, starts[:, None] + columns, 0)
    ids = np.where(inside, tokens.take(places), 0).astype(np.int32)
    example_ids = np.arange(len(starts), dtype=np.int32)
    if not isolate_documents:
        return StreamBatch(ids, inside[:, 1:], example_ids)
    begins, _ = document_bounds(tokens, places)
    new = begins[:, 1:] != begins[:, :-1]
    segments = np.cumsum(np.pad(new, ((0, 0), (1, 0)), constant_values=True), axis=1)
    positions = places - np.maximum(begins, starts[:, None])
    return StreamBatch(
        ids,
        inside[:, 1:] & ~new,
        example_ids,
        np.where(inside, segments, 0).astype(np.int32),
        np.where(inside, positions, 0).astype(np.int32),
    )
