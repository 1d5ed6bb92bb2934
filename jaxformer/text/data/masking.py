"""Batches in which some tokens are masked and have to be predicted (BERT)."""

import hashlib
from collections.abc import Iterator

import numpy as np

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data.batches import (
    MaskedBatch,
    RowSelection,
    all_rows,
    check_at_least,
    check_seed,
    select_rows,
)
from jaxformer.text.data.streams import (
    ShuffledWindows,
    check_context,
    document_bounds,
    random_bits,
)
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
    `DataError` when `special` lacks mask, bos or eos, for a corpus without tokens, and with
    `next_sentence` for fewer than two documents.

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
        check_at_least(1, batch_size=batch_size)
        check_seed(seed)
        if not 0 < mask_prob < 1:
            raise ConfigError(f"mask_prob must be between 0 and 1, got {mask_prob}")
        self._mask: int = -1 if special.mask is None else special.mask
        for role in ("mask", "bos", "eos"):
            if getattr(special, role) is None:
                raise DataError(
                    f"masked rows need a {role} token and the vocabulary has none; train the "
                    "tokenizer with MASKED_SPECIAL_TOKENS"
                )
        for role, index in special._asdict().items():
            if index is not None and index >= vocab_size:
                raise DataError(
                    f"the {role} token has the id {index}, but the model has only {vocab_size} "
                    "ids: train a tokenizer of its own"
                )
        least, layout = (5, "bos, A, eos, B, eos") if next_sentence else (3, "bos, a token, eos")
        if seq_len < least:
            raise ConfigError(f"seq_len must be at least {least} ({layout}), got {seq_len}")
        if next_sentence and np.count_nonzero(tokens.lengths) < 2:
            raise DataError("next_sentence needs two documents or more, got one document")
        check_context(tokens, 1, "a token to predict")
        self._specials = np.array([id for id in special if id is not None])
        self._ordinary = np.setdiff1d(np.arange(vocab_size), self._specials)
        if len(self._ordinary) == 0:
            raise ConfigError(
                f"vocab_size must be more than the {len(self._specials)} special tokens, "
                f"got {vocab_size}"
            )
        self.tokens = tokens
        self.batch_size = batch_size
        self._shape, self._seed, self._special = (batch_size, seq_len), seed, special
        self._vocab_size, self._mask_prob = vocab_size, mask_prob
        self._next_sentence = next_sentence
        self._space: int = seq_len - (3 if next_sentence else 2)  # less the special tokens
        self._windows = ShuffledWindows(len(tokens.ids), self._space, batch_size, seed)
        self.steps_per_epoch: int = self._windows.steps_per_epoch

    @property
    def rows_per_epoch(self) -> int:
        """The rows of an epoch, without the empty ones that fill up its last batch."""
        return self._windows.count

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: ids, shape, masks and seed."""
        masks = (self._shape, self._seed, tuple(self._special), self._vocab_size, self._mask_prob)
        values = (self.tokens.fingerprint, self._next_sentence, masks)
        return hashlib.sha256(repr(values).encode()).hexdigest()

    def batch(self, step: int, rows: RowSelection = all_rows) -> MaskedBatch:
        """The batch of `step` (0, 1, ..); it does not depend on which batches were made before.

        Only the rows that `rows` selects are read and returned.
        """
        row = select_rows(rows, self.batch_size)
        starts, sizes = self._windows.at(step, row)
        if self._next_sentence:
            return self._pair_rows(step, row, starts, sizes)
        return self._window_rows(step, _MASKS, row, starts, sizes)

    def once(self) -> Iterator[MaskedBatch]:
        """The whole text once, in order, with masks drawn from the seed: the same at every call.

        The last row and the last batch are filled up. With `next_sentence` there is a row for each
        window, of text around the window's middle.
        """
        row, total = all_rows(self.batch_size), len(self.tokens.ids)
        for step, first in enumerate(range(0, total, self.batch_size * self._space)):
            starts = np.minimum(first + row * self._space, total)
            sizes = np.minimum(total - starts, self._space)
            if self._next_sentence:
                yield self._pair_rows(step, row, starts, sizes)
            else:
                yield self._window_rows(step, _ONCE, row, starts, sizes)

    # The random bits of a row do not depend on which other rows are made.

    def _window_rows(
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

    def _pair_rows(
        self, step: int, row: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> MaskedBatch:
        """Rows bos A eos B eos, A from the document in the middle of each window."""
        draws = random_bits(self._seed, step, _PAIRS, 3 * self._shape[0]).reshape(3, -1, 1)[:, row]
        follows, a, a_start, b, b_start = self._split(draws, starts, sizes)
        columns = np.arange(self._shape[1])
        in_a = (columns >= 1) & (columns <= a)
        in_b = (columns >= a + 2) & (columns <= a + b + 1)
        positions = np.where(in_a, a_start + columns - 1, b_start + columns - a - 2)
        ids = self._gather(positions, in_a | in_b)
        real = (columns <= a + b + 2) & (a > 0)
        ids[real & (columns == 0)] = self._special.bos
        ids[real & ((columns == a + 1) | (columns == a + b + 2))] = self._special.eos
        batch = self._masked(step, _MASKS, row, ids, real)
        return batch._replace(
            token_type_ids=(real & (columns > a + 1)).astype(np.int32),
            next_sentence=follows[:, 0].astype(np.int32),
        )

    def _split(
        self, draws: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Whether B follows A, and length and start of A and of B, each [B, 1]."""
        tokens, total, space = self.tokens, len(self.tokens.ids), self._space
        coin, cut, other = draws
        middle = np.minimum(starts + sizes // 2, total - 1)[:, None]
        begin, end = document_bounds(tokens, middle)
        start = np.clip(middle - space // 2, begin, np.maximum(begin, end - space))
        run = np.minimum(end - start, space) * (sizes > 0)[:, None]
        a = np.minimum(1 + _below(cut, np.maximum(run - 1, 1)), run)
        follows = (coin >> np.uint64(63) == 1) & (run >= 2)
        other_token = _below(other, total - (end - begin))
        other_token += np.where(other_token >= begin, end - begin, 0)  # past the document of A
        other_begin, other_end = document_bounds(tokens, other_token)
        # At most as long as the text that follows A, so that the length gives no hint.
        b = np.minimum(np.maximum(run - a, a > 0), other_end - other_begin)
        b_start = np.minimum(other_token, other_end - b)
        b, b_start = np.where(follows, run - a, b), np.where(follows, start + a, b_start)
        return follows, a, start, b, b_start

    def _gather(self, positions: np.ndarray, text: np.ndarray) -> np.ndarray:
        """[B, T] the ids at `positions` where `text`, elsewhere padding."""
        ids = self.tokens.take(np.where(text, positions, 0))
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
