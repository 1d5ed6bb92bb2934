"""What fine-tuning on few examples needs: rows of ids, their batches, and the result's folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.harness.runs import run_folder
from jaxformer.pretrained import is_pretrained


class LabelledBatch(NamedTuple):
    """B texts and their labels (see `Examples`); rows outside `loss_mask` do not count."""

    tokens: np.ndarray  # [B, T] int32
    padding_mask: np.ndarray  # [B, T] bool, False at padding
    labels: np.ndarray
    loss_mask: np.ndarray  # [B] bool
    example_ids: np.ndarray  # [B] int32
    token_type_ids: np.ndarray | None = None  # [B, T] int32


class Examples(NamedTuple):
    """N texts as ids, padded at their ends, and what is to be learned of each.

    `labels` are the numbers of classes [N], the first and the last token of an answer [N, 2], or
    which tokens belong to an answer [N, T].
    """

    tokens: np.ndarray  # [N, T] int32
    padding_mask: np.ndarray  # [N, T] bool, False at padding
    labels: np.ndarray
    token_type_ids: np.ndarray | None = None  # [N, T] int32, which text of a pair

    def select(self, count: int, seed: int) -> np.ndarray:
        """The numbers [count] of random texts, as evenly over the classes as possible; 0: all."""
        order = _order(seed, 0, len(self.labels))
        labels = self.labels[order] if self.labels.ndim == 1 else np.zeros(len(order), np.int32)
        turn = np.zeros(len(order), np.int64)
        for label in np.unique(labels):
            turn[labels == label] = np.arange(np.sum(labels == label))
        return order[np.argsort(turn, kind="stable")[: count or None]]

    def batch(self, chosen: np.ndarray, rows: int, seed: int, step: int) -> LabelledBatch:
        """The batch of `step` (0, 1, ..) of the texts numbered `chosen`.

        An epoch takes each text once, in a new order; it may end within a batch.
        """
        epochs, places = np.divmod(step * rows + np.arange(rows), len(chosen))
        orders = {epoch: _order(seed, 1 + epoch, len(chosen)) for epoch in np.unique(epochs)}
        numbers = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return self._gather(chosen[numbers], rows)

    def iterate_once(self, rows: int) -> Iterator[LabelledBatch]:
        """All texts in order; the last batch is filled up with rows that do not count."""
        numbers = np.arange(len(self.labels))
        for start in range(0, len(numbers), rows):
            yield self._gather(numbers[start : start + rows], rows)

    def _gather(self, numbers: np.ndarray, rows: int) -> LabelledBatch:
        row = np.arange(rows, dtype=np.int32)
        filled = np.resize(numbers, rows)
        tokens, present, labels = (leaf[filled] for leaf in self[:3])
        types = None if self.token_type_ids is None else self.token_type_ids[filled]
        return LabelledBatch(tokens, present, labels, row < len(numbers), row, types)


def padded(
    rows: Sequence[list[int]],
    labels: np.ndarray,
    pad: int | None,
    length: int,
    types: Sequence[list[int]] | None = None,
) -> Examples:
    """The rows of at most `length` ids as arrays, padded at their ends."""
    tokens = np.full((len(rows), length), pad or 0, np.int32)
    present = np.zeros(tokens.shape, bool)
    kinds = None if types is None else np.zeros(tokens.shape, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], present[i, : len(row)] = row, True
        if types is not None and kinds is not None:
            kinds[i, : len(row)] = types[i]
    return Examples(tokens, present, labels, kinds)


def result_folder(options: Any, experiment: str) -> Path:
    """The folder for the result of `options.run`: the run's, or a new one for pretrained weights.

    Raises `ConfigError` for a name that no folder can have.
    """
    given = Path(options.run)
    if not options.name and not is_pretrained(given):
        return given
    return run_folder.folder_of(options.runs, experiment, options.name or given.resolve().name)


def _order(seed: int, number: int, size: int) -> np.ndarray:
    """0 .. size - 1 in a random order, which depends on (seed, number) and on no version."""
    bits = np.random.Philox(key=np.array([seed, number], np.uint64))
    return np.argsort(bits.random_raw(size), kind="stable")
