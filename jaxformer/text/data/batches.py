"""The batches that a training step takes: named tuples of arrays with B rows each.

`example_ids` number the rows of the whole batch, also where a process holds a part of it: dropout
depends on them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from jaxtyping import Bool, Int, Int64

from jaxformer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from jaxtyping import Array as JaxArray

    Array = np.ndarray | JaxArray
else:  # this layer does not import JAX
    Array = np.ndarray


RowSelection = Callable[[int], Int64[np.ndarray, " W"]]
"""A choice of rows of a batch: their number B -> ascending numbers of 0 .. B - 1."""


class Batches(Protocol):
    """The source of a training's batches: a batch is a function of (seed, step)."""

    @property
    def steps_per_epoch(self) -> int:
        """The steps after which all data has been seen once."""
        ...

    @property
    def fingerprint(self) -> str:
        """A text that differs where batches differ; a run resumes with the same one only."""
        ...

    def batch(self, step: int, rows: RowSelection, /) -> Any:
        """The rows of the batch of `step` (0, 1, ..) that `rows` selects, as numpy arrays."""


class PairBatch(NamedTuple):
    """B pairs of sentences; a row that is all `<pad>` on both sides holds no pair.

    >>> source, target = np.array([[5, 6, jf.EOS]]), np.array([[jf.BOS, 7, jf.EOS, jf.PAD]])
    >>> jf.PairBatch.create(source, target, vocab_size=8).example_ids
    array([0], dtype=int32)
    >>> jf.PairBatch.create(source, target, vocab_size=7)
    Traceback (most recent call last):
        ...
    jaxformer.errors.DataError: target holds the id 7, but vocab_size=7: ids must be 0 to 6; ...
    """

    source: Int[Array, "B S"]
    """x1 .. xn <eos> <pad> .."""
    target: Int[Array, "B T+1"]
    """<bos> y1 .. ym <eos> <pad> .."""
    example_ids: Int[Array, " B"]
    """The number of each row in the whole batch."""

    @classmethod
    def create(
        cls,
        source: Int[Array, "B S"],
        target: Int[Array, "B T+1"],
        *,
        vocab_size: int,
        source_vocab_size: int | None = None,
    ) -> "PairBatch":
        """A batch of one's own arrays, whose rows are numbered from 0.

        `source_vocab_size` None means one vocabulary. Raises `DataError` for an id outside its
        vocabulary.
        """
        check_ids("source", source, source_vocab_size or vocab_size)
        check_ids("target", target, vocab_size)
        return cls(source, target, np.arange(len(source), dtype=np.int32))


class StreamBatch(NamedTuple):
    """B rows of T tokens and the token after them: the labels are `tokens[:, 1:]`.

    >>> batch = jf.StreamBatch.create(np.array([[1, 5, 6], [7, 8, 2]]), vocab_size=9)
    >>> batch.tokens[:, 1:].tolist(), batch.loss_mask.shape  # the labels
    ([[5, 6], [8, 2]], (2, 2))
    """

    tokens: Int[Array, "B T+1"]
    """Ids; beyond the text they are 0."""
    loss_mask: Bool[Array, "B T"]
    """True at labels that count."""
    example_ids: Int[Array, " B"]
    """The number of each row in the whole batch."""
    segments: Int[Array, "B T+1"] | None = None
    """The documents of a row numbered from 1, 0 beyond the text; None where a token sees all
    documents before it."""
    positions: Int[Array, "B T+1"] | None = None
    """Positions counted from 0 in every document of a row; None likewise."""

    @classmethod
    def create(cls, tokens: Int[Array, "B T+1"], *, vocab_size: int) -> "StreamBatch":
        """A batch of one's own array of full rows, which are numbered from 0.

        Raises `DataError` for an id outside the vocabulary.
        """
        check_ids("tokens", tokens, vocab_size)
        rows, length = tokens.shape
        return cls(tokens, np.ones((rows, length - 1), bool), np.arange(rows, dtype=np.int32))


class MaskedBatch(NamedTuple):
    """B rows of T tokens; the model predicts at most P tokens of each row.

    >>> from jaxformer.text.data import MaskedStream, Tokens
    >>> from jaxformer.text.tokenizers import SpecialTokens
    >>> sizes = {"batch_size": 2, "seq_len": 14, "vocab_size": 11}
    >>> special = SpecialTokens(bos=1, eos=2, mask=3)
    >>> stream = MaskedStream(Tokens.from_lists([[5, 6] * 9]), seed=0, special=special, **sizes)
    >>> batch = stream.batch(0)
    >>> batch.tokens.shape, batch.labels.shape  # [B, T] and [B, P]: 0.15 x 14 are to be predicted
    ((2, 14), (2, 2))
    """

    tokens: Int[Array, "B T"]
    """bos text eos, or bos A eos B eos; some tokens of the text are replaced."""
    padding_mask: Bool[Array, "B T"]
    """True at real tokens, False at padding."""
    token_type_ids: Int[Array, "B T"]
    """1 for B and the eos after it, else 0."""
    masked_positions: Int[Array, "B P"]
    """The positions to predict, ascending; 0 where `loss_mask` is False."""
    labels: Int[Array, "B P"]
    """The original tokens at these positions; 0 where `loss_mask` is False."""
    loss_mask: Bool[Array, "B P"]
    """True at each of the P predictions that counts."""
    example_ids: Int[Array, " B"]
    """The number of each row in the whole batch."""
    next_sentence: Int[Array, " B"]
    """1 where B follows A in its document, else 0."""


_B = TypeVar("_B")


def fill_rows(batch: _B, count: int) -> _B:
    """`batch` with empty rows at its end, in which no label counts, so that it has `count` rows.

    A batch is a `PairBatch` or any named tuple of arrays with a `loss_mask`; `ConfigError` for
    another one that has other rows.

    >>> batch = jf.StreamBatch.create(np.array([[1, 5, 6]]), vocab_size=9)
    >>> fill_rows(batch, 2).loss_mask.tolist()
    [[True, True], [False, False]]
    """
    rows = count_rows(batch)
    if isinstance(batch, PairBatch) or (isinstance(batch, tuple) and hasattr(batch, "loss_mask")):
        filled: Any = (None if leaf is None else pad_rows(leaf, count) for leaf in batch)
        kind: Any = type(batch)
        return kind(*filled)
    if rows != count:
        raise ConfigError(
            f"a batch of the type {type(batch).__name__} has {rows} rows, but the devices share "
            f"{count}: give it as many, or a loss_mask, which empty rows need"
        )
    return batch


def pad_rows(leaf: Any, count: int) -> np.ndarray:
    """`leaf` with rows of zeros at its end, so that it has `count`."""
    return np.pad(leaf, [(0, count - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)])


def count_rows(batch: Any) -> int:
    """The number of rows B of a named tuple or dict of arrays."""
    leaves = batch.values() if isinstance(batch, dict) else batch
    return next(len(leaf) for leaf in leaves if np.ndim(leaf))


def check_ids(name: str, ids: Int[Array, "..."], vocab_size: int) -> None:
    """Raises `DataError`, naming the first one, for ids of the array `name` outside the vocabulary.

    Nothing is checked inside `jax.jit`: call it where the array is made.
    """
    try:
        values = np.asarray(ids)
    except TypeError:  # an array that JAX traces
        return
    if values.dtype.kind not in "iu":
        raise DataError(f"{name} must hold integer ids, got {values.dtype}")
    wrong = values[(values < 0) | (values >= vocab_size)]
    if wrong.size:
        raise DataError(
            f"{name} holds the id {wrong[0]}, but vocab_size={vocab_size}: ids must be 0 to "
            f"{vocab_size - 1}; encode the text with the model's own tokenizer"
        )


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


def check_at_least(least: int, **numbers: int) -> None:
    """Raises `ConfigError` naming the first of `numbers` that is below `least`.

    It says so as a configuration's fields do, whose checks need JAX.
    """
    for name, value in numbers.items():
        if value < least:
            raise ConfigError(f"{name}={value}, but it must be at least {least}")


def check_seed(seed: int) -> None:
    """Raises `ConfigError` unless `seed` has 32 bits, as JAX's seeds have."""
    if not 0 <= seed < 1 << 32:
        raise ConfigError(f"seed={seed}, but it must be in [0, {1 << 32})")
