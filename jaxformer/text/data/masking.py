"""Batches in which some tokens are masked and have to be predicted (BERT)."""

import hashlib
from collections.abc import Iterator

import numpy as np

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data.batches import MaskedBatch
from jaxformer.text.data.shuffle import (
    RowSelection,
    ShuffledWindows,
    all_rows,
    check_positive,
    check_seed,
    random_bits,
    select_rows,
)
from jaxformer.text.data.streams import check_context, document_bounds
from jaxformer.text.data.tokens import Tokens
from jaxformer.text.tokenizers import SpecialTokens

_MASKS, _PAIRS, _ONCE = 1, 2, 3  # what random bits are for


class MaskedStream:
    """Batches of `batch_size` masked rows of `seq_len` tokens, special tokens included.

    Rows are windows over the documents of `tokens` (written without bos and eos), cut and ordered
    anew in every epoch. The model predicts round(mask_prob * seq_len) tokens of a full row, at
    least one, and no special ones. 80 % of them become special.mask, 10 % a random token, and 10 %
    stay (Devlin et al. 2019, section 3.1). With `next_sentence` a window lies in one document and
    is split into A and B. In half of the rows B is replaced by text of another document. Raises
    `DataError` when `special` lacks mask, bos or eos, for a corpus shorter than one context, and
    with `next_sentence` for fewer than two documents.

    Attributes: `tokens`; `batch_size`; `steps_per_epoch`.

    >>> documents = Tokens.from_lists([[5] * 60])  # a document of one word
    >>> special = SpecialTokens(bos=1, eos=2, mask=3)
    >>> stream = jf.MaskedStream(
    ...     documents, batch_size=2, seq_len=12, seed=0, special=special, vocab_size=6
    ... )
    >>> stream.batch(0).labels.tolist()  # round(0.15 x 12) in each row
    [[5, 5], [5, 5]]
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        special: SpecialTokens,
        vocab_size: int,
        mask_prob: float = 0.15,
        next_sentence: bool = False,
    ) -> None:
        shape = batch_size, seq_len
        self._masker = _Masker(tokens, shape, seed, special, vocab_size, mask_prob)
        space = _space(tokens, seq_len, next_sentence)
        check_context(tokens, space, f"seq_len {seq_len} less the special tokens")
        self.tokens = tokens
        self.batch_size = batch_size
        self._windows = ShuffledWindows(len(tokens.ids), space, batch_size, seed)
        self._next_sentence = next_sentence
        self.steps_per_epoch: int = self._windows.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: ids, shape, masks and seed."""
        values = (self.tokens.fingerprint, self._next_sentence, self._masker.settings)
        return hashlib.sha256(repr(values).encode()).hexdigest()

    def batch(self, step: int, rows: RowSelection = all_rows) -> MaskedBatch:
        """The batch of `step` (0, 1, ..); it does not depend on which batches were made before.

        Only the rows that `rows` selects are read and returned.
        """
        selected = select_rows(rows, self._windows.batch_size)
        starts, sizes = self._windows.at(step, selected)
        if self._next_sentence:
            return self._masker.pairs(step, selected, starts, sizes)
        return self._masker.windows(step, _MASKS, selected, starts, sizes)


def iterate_masked_once(
    tokens: Tokens,
    *,
    batch_size: int,
    seq_len: int,
    seed: int,
    special: SpecialTokens,
    vocab_size: int,
    mask_prob: float = 0.15,
    next_sentence: bool = False,
) -> Iterator[MaskedBatch]:
    """The whole stream once, in order, with masks drawn from `seed`: the same at every call.

    Rows are those of `MaskedStream`; the last row and the last batch are filled up. With
    `next_sentence` there is a row for each window, of text around the window's middle. Raises what
    `MaskedStream` raises, except for a corpus shorter than one context.
    """
    shape = batch_size, seq_len
    masker = _Masker(tokens, shape, seed, special, vocab_size, mask_prob)
    space = _space(tokens, seq_len, next_sentence)
    check_context(tokens, 1, "a token to predict")
    row = all_rows(batch_size)
    for step, first in enumerate(range(0, len(tokens.ids), batch_size * space)):
        starts = np.minimum(first + row * space, len(tokens.ids))
        sizes = np.minimum(len(tokens.ids) - starts, space)
        if next_sentence:
            yield masker.pairs(step, row, starts, sizes)
        else:
            yield masker.windows(step, _ONCE, row, starts, sizes)


def _space(tokens: Tokens, seq_len: int, next_sentence: bool) -> int:
    """The tokens of a row that are not special."""
    if not next_sentence:
        return seq_len - 2
    if seq_len < 5:
        raise ConfigError(f"seq_len must be at least 5 (bos, A, eos, B, eos), got {seq_len}")
    if np.count_nonzero(tokens.lengths) < 2:
        raise DataError("next_sentence needs two documents or more, got one document")
    return seq_len - 3


class _Masker:
    """Makes rows of windows, and masks some of their tokens.

    `row` [W] are the numbers of the rows to make, `starts` and `sizes` [W] their windows. The
    random bits of a row do not depend on which other rows are made.
    """

    def __init__(
        self,
        tokens: Tokens,
        shape: tuple[int, int],
        seed: int,
        special: SpecialTokens,
        vocab_size: int,
        mask_prob: float,
    ) -> None:
        batch_size, seq_len = shape
        check_positive(batch_size=batch_size)
        check_seed(seed)
        if seq_len < 3:
            raise ConfigError(f"seq_len must be at least 3 (bos, a token, eos), got {seq_len}")
        if not 0 < mask_prob < 1:
            raise ConfigError(f"mask_prob must be between 0 and 1, got {mask_prob}")
        for role in ("mask", "bos", "eos"):
            if getattr(special, role) is None:
                raise DataError(
                    f"masked rows need a {role} token and the vocabulary has none; train the "
                    "tokenizer with MASKED_SPECIAL_TOKENS"
                )
        assert special.mask is not None  # for type checkers
        self._mask = special.mask
        self.settings = (shape, seed, tuple(special), vocab_size, mask_prob)
        self._tokens, self._shape, self._seed, self._special = tokens, shape, seed, special
        self._mask_prob, self._vocab_size = mask_prob, vocab_size
        self._specials = np.array([id for id in special if id is not None])
        self._ordinary = np.setdiff1d(np.arange(vocab_size), self._specials)
        if len(self._ordinary) == 0:
            raise ConfigError(
                f"vocab_size must be more than the {len(self._specials)} special tokens, "
                f"got {vocab_size}"
            )

    def windows(
        self, step: int, purpose: int, row: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> MaskedBatch:
        """Rows bos window eos; a window of no ids gives an empty row."""
        columns, sizes = np.arange(self._shape[1]), sizes[:, None]
        text = (columns >= 1) & (columns <= sizes)
        ids = self._gather(starts[:, None] + columns - 1, text)
        real = (columns < sizes + 2) & (sizes > 0)
        ids[real & (columns == 0)] = self._special.bos
        ids[real & (columns == sizes + 1)] = self._special.eos
        return self._masked(step, purpose, row, ids, real)

    def pairs(
        self, step: int, row: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> MaskedBatch:
        """Rows bos A eos B eos, A from the document in the middle of each window."""
        space = self._shape[1] - 3
        draws = random_bits(self._seed, step, _PAIRS, 3 * self._shape[0]).reshape(3, -1, 1)[:, row]
        follows, a, a_start, b, b_start = self._split(draws, starts, sizes, space)
        columns = np.arange(self._shape[1])
        in_a = (columns >= 1) & (columns <= a)
        in_b = (columns >= a + 2) & (columns <= a + b + 1)
        places = np.where(in_a, a_start + columns - 1, b_start + columns - a - 2)
        ids = self._gather(places, in_a | in_b)
        real = (columns <= a + b + 2) & (a > 0)
        ids[real & (columns == 0)] = self._special.bos
        ids[real & ((columns == a + 1) | (columns == a + b + 2))] = self._special.eos
        batch = self._masked(step, _MASKS, row, ids, real)
        return batch._replace(
            token_type_ids=(real & (columns > a + 1)).astype(np.int32),
            next_sentence=follows[:, 0].astype(np.int32),
        )

    def _split(
        self, draws: np.ndarray, starts: np.ndarray, sizes: np.ndarray, space: int
    ) -> tuple[np.ndarray, ...]:
        """Whether B follows A, and length and start of A and of B, each [B, 1]."""
        tokens, total = self._tokens, len(self._tokens.ids)
        coin, cut, other = draws
        middle = np.minimum(starts + sizes // 2, total - 1)[:, None]
        begin, end = document_bounds(tokens, middle)
        start = np.clip(middle - space // 2, begin, np.maximum(begin, end - space))
        run = np.minimum(end - start, space) * (sizes > 0)[:, None]
        a = np.minimum(1 + _below(cut, np.maximum(run - 1, 1)), run)
        follows = (coin >> np.uint64(63) == 1) & (run >= 2)
        other_place = _below(other, total - (end - begin))
        other_place += np.where(other_place >= begin, end - begin, 0)  # past the document of A
        other_begin, other_end = document_bounds(tokens, other_place)
        # At most as long as the text that follows A, so that the length gives no hint.
        b = np.minimum(np.maximum(run - a, a > 0), other_end - other_begin)
        b_start = np.minimum(other_place, other_end - b)
        b, b_start = np.where(follows, run - a, b), np.where(follows, start + a, b_start)
        return follows, a, start, b, b_start

    def _gather(self, places: np.ndarray, text: np.ndarray) -> np.ndarray:
        """[B, T] the ids at `places` where `text`, elsewhere padding."""
        ids = self._tokens.take(np.where(text, places, 0))
        if ids.max() >= self._vocab_size:
            raise DataError(
                f"ids must be 0 to {self._vocab_size - 1}, got {ids.max()}: the tokens were "
                "written with another vocabulary"
            )
        return np.where(text, ids, self._special.pad or 0).astype(np.int32)

    def _masked(
        self, step: int, purpose: int, row: np.ndarray, ids: np.ndarray, real: np.ndarray
    ) -> MaskedBatch:
        rows, length = self._shape
        most = max(1, round(self._mask_prob * length))
        draws = random_bits(self._seed, step, purpose, rows * (length + 2 * most))
        keys = draws[: rows * length].reshape(rows, length)[row] >> np.uint64(1)
        actions, random_ids = draws[rows * length :].reshape(2, rows, most)[:, row]
        candidates = real & ~np.isin(ids, self._specials)
        keys[~candidates] = np.iinfo(np.uint64).max
        needed = np.maximum(np.rint(self._mask_prob * real.sum(1)), 1)
        counts = np.arange(most) < np.minimum(needed, candidates.sum(1))[:, None]
        at = np.argsort(keys, axis=1, kind="stable")[:, :most]
        at = np.where(counts, np.sort(np.where(counts, at, length), axis=1), 0)
        originals = np.take_along_axis(ids, at, axis=1)
        tenth = actions % np.uint64(10)
        random = self._ordinary[_below(random_ids, len(self._ordinary))]
        hidden = np.where(tenth < 8, self._mask, np.where(tenth == 8, random, originals))
        tokens = ids.copy()
        np.put_along_axis(tokens, at, np.where(counts, hidden, originals).astype(np.int32), axis=1)
        return MaskedBatch(
            tokens=tokens,
            padding_mask=real,
            token_type_ids=np.zeros_like(ids),
            masked_positions=at.astype(np.int32),
            labels=np.where(counts, originals, 0).astype(np.int32),
            loss_mask=counts,
            example_ids=row.astype(np.int32),
            next_sentence=np.zeros(len(row), np.int32),
        )


def _below(draws: np.ndarray, limit: np.ndarray | int) -> np.ndarray:
    """`draws` modulo `limit`, int64."""
    return (draws % np.asarray(limit).astype(np.uint64)).astype(np.int64)
