"""Texts as rows of ids with labels, and their batches as functions of seed and step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from flax import linen as nn

from experiments.language_modelling.load_run import LoadedRun
from jaxformer.nn.models import DecoderOnly
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import Loss


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


class Scored(NamedTuple):
    """The scores of the test texts, the one to report first, and a line of output for each."""

    metrics: dict[str, float]
    lines: list[str]


class TaskData(NamedTuple):
    """What a task makes of a run and its texts.

    `model` learns `train` by `loss`. `outputs(params, batch)` [B, ...] of the test rows, all of
    them [N, ...] in order, are what `score` reads. `title` says what the first score is.
    """

    train: Examples
    test: Examples
    model: nn.Module
    loss: Loss
    outputs: Callable[[Any, LabelledBatch], Any]
    score: Callable[[np.ndarray], Scored]
    title: str


class Frame(NamedTuple):
    """The ids before, between and after the two texts of a pair, and the types of these parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: tuple[int, int] = (0, 1)

    @property
    def size(self) -> int:
        """The number of ids that are not of the texts."""
        return len(self.before) + len(self.between) + len(self.after)

    def row(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        """The ids of a pair, and the type of each."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        count = len(self.before) + len(first) + len(self.between)
        return ids, [self.types[0]] * count + [self.types[1]] * (len(ids) - count)


def frame_of(loaded: LoadedRun) -> tuple[list[int], list[int]]:
    """The ids that the run's model reads before and after a text."""
    special = loaded.tokenizer.special
    begin = [] if special.bos is None else [special.bos]
    end = [] if special.eos is None else [special.eos]
    if not isinstance(loaded.model, DecoderOnly):
        return begin, end
    # A causal model has never read the end token, and a text's vector is that of its last token.
    return (begin, []) if loaded.config.data.isolate_documents else ([], [])


def pair_frame(loaded: LoadedRun) -> Frame:
    """The frame of a pair: that of the tokenizer's own template, or else as in pretraining.

    A causal model reads a line feed between the texts.
    """
    begin, end = frame_of(loaded)
    if isinstance(loaded.model, DecoderOnly):
        return Frame(begin, loaded.tokenizer.encode("\n"), end)
    pair = loaded.tokenizer.library_tokenizer.encode("a", "a")
    of = pair.sequence_ids
    if 0 not in of or 1 not in of or None not in of:
        return Frame(begin, end, end)
    first, second = of.index(0), of.index(1)
    last = len(of) - of[::-1].index(1)
    between = next(i for i in range(first, second) if of[i] is None)
    types = pair.type_ids[first], pair.type_ids[second]
    return Frame(pair.ids[:first], pair.ids[between:second], pair.ids[last:], types)


def padded(
    rows: Sequence[list[int]],
    labels: np.ndarray,
    tokenizer: Tokenizer,
    length: int,
    types: Sequence[list[int]] | None = None,
) -> Examples:
    """The rows of at most `length` ids as arrays, padded at their ends."""
    tokens = np.full((len(rows), length), tokenizer.special.pad or 0, np.int32)
    present = np.zeros(tokens.shape, bool)
    kinds = None if types is None else np.zeros(tokens.shape, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], present[i, : len(row)] = row, True
        if types is not None and kinds is not None:
            kinds[i, : len(row)] = types[i]
    return Examples(tokens, present, labels, kinds)


def _order(seed: int, number: int, size: int) -> np.ndarray:
    """0 .. size - 1 in a random order, which depends on (seed, number) and on no version."""
    bits = np.random.Philox(key=np.array([seed, number], np.uint64))
    return np.argsort(bits.random_raw(size), kind="stable")
