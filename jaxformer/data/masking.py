"""Rows of which some tokens are hidden, to be predicted from both sides (BERT)."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.data.order import (
    Rows,
    Windows,
    at_least_one,
    check_seed,
    draw,
    every_row,
    wanted,
)
from jaxformer.data.streams import check_context, document_bounds
from jaxformer.data.tokens import Tokens
from jaxformer.tokenizers import DataError, Special

_MASKS, _PAIRS, _COVER = 1, 2, 3


class MaskedBatch(NamedTuple):
    """B rows of T tokens of which at most P are to be predicted.

    tokens: [B, T] int32, bos text eos, or bos A eos B eos, some tokens of the text replaced.
    present: [B, T] bool, False at padding.
    types: [B, T] int32, 1 for B and the eos after it, else 0.
    at: [B, P] int32, the positions to predict, ascending.
    labels: [B, P] int32, the original tokens there.
    valid: [B, P] bool, which of them count; elsewhere `at` and `labels` are 0.
    row: [B] int32, the global row numbers.
    follows: [B] int32, 1 where B follows A in its document, else 0.
    """

    tokens: np.ndarray
    present: np.ndarray
    types: np.ndarray
    at: np.ndarray
    labels: np.ndarray
    valid: np.ndarray
    row: np.ndarray
    follows: np.ndarray


class MaskedStream:
    """Batches of `rows` masked rows of `length` tokens, special ones included.

    Rows are windows over the documents of `tokens` (written without bos and eos), cut and ordered
    anew every epoch. round(rate * length) tokens of a full row, at least one, never special ones,
    are to be predicted: of these 80 % become special.mask, 10 % a random token, 10 % stay (Devlin
    et al. 2019, section 3.1). With `pairs` a window keeps to one document and is split into A and
    B; in half of the rows B is replaced by text of another document. Raises `DataError` when
    `special` lacks mask, bos or eos, for a corpus shorter than one context, and for pairs of
    fewer than two documents.

    Attributes: `tokens`; `steps_per_epoch`.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        rows: int,
        length: int,
        seed: int,
        special: Special,
        vocab_size: int,
        rate: float = 0.15,
        pairs: bool = False,
    ) -> None:
        self._masker = _Masker(
            tokens,
            shape=(rows, length),
            seed=seed,
            special=special,
            vocab_size=vocab_size,
            rate=rate,
        )
        space = length - (3 if pairs else 2)
        if space < 2 and pairs:
            raise ConfigError(f"length must be at least 5 (bos, A, eos, B, eos), got {length}")
        check_context(tokens, space, f"length {length} less the special tokens")
        if pairs and np.count_nonzero(tokens.lengths) < 2:
            raise DataError("pairs need text of two documents or more, got one document")
        self.tokens = tokens
        self._windows = Windows(len(tokens.ids), space, rows, seed)
        self._pairs = pairs
        self.steps_per_epoch = self._windows.steps_per_epoch

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: ids, shape, masks and seed."""
        facts = (self.tokens.fingerprint, self._pairs, self._masker.facts)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def batch(self, step: int, rows: Rows = every_row) -> MaskedBatch:
        """The batch of `step` (0, 1, ..), the same whenever and in whatever order asked for.

        Only the `rows` wanted of it are read and returned.
        """
        own = wanted(rows, self._windows.rows)
        starts, sizes = self._windows.at(step, own)
        if self._pairs:
            return self._masker.pairs(step, own, starts, sizes)
        return self._masker.windows(step, _MASKS, own, starts, sizes)


def cover_masked(
    tokens: Tokens,
    *,
    rows: int,
    length: int,
    seed: int,
    special: Special,
    vocab_size: int,
    rate: float = 0.15,
) -> Iterator[MaskedBatch]:
    """The whole stream once, in order, with masks drawn from `seed`: the same at every call.

    Rows are as those of `MaskedStream` without pairs; the last row and the last batch are filled
    up. Raises as it does, but for a corpus shorter than one context.
    """
    masker = _Masker(
        tokens, shape=(rows, length), seed=seed, special=special, vocab_size=vocab_size, rate=rate
    )
    space = length - 2
    check_context(tokens, 1, "a token to predict")
    row = every_row(rows)
    for step, first in enumerate(range(0, len(tokens.ids), rows * space)):
        starts = np.minimum(first + row * space, len(tokens.ids))
        sizes = np.minimum(len(tokens.ids) - starts, space)
        yield masker.windows(step, _COVER, row, starts, sizes)


class _Masker:
    """Makes rows of windows, and hides some of their tokens.

    `row` [B] are the numbers of the rows to make, windows [B] those of these rows: what is drawn
    for a row does not depend on which others are made.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        shape: tuple[int, int],
        seed: int,
        special: Special,
        vocab_size: int,
        rate: float,
    ) -> None:
        rows, length = shape
        at_least_one({"rows": rows})
        check_seed(seed)
        if length < 3:
            raise ConfigError(f"length must be at least 3 (bos, a token, eos), got {length}")
        if not 0 < rate < 1:
            raise ConfigError(f"rate must be between 0 and 1, got {rate}")
        for role in ("mask", "bos", "eos"):
            if getattr(special, role) is None:
                raise DataError(
                    f"masked rows need a {role} token and the vocabulary has none; train the "
                    "tokenizer with MASKED_SPECIAL_TOKENS"
                )
        self.facts = (shape, seed, tuple(special), vocab_size, rate)
        self._tokens, self._shape, self._seed, self._special = tokens, shape, seed, special
        self._rate, self._vocab_size = rate, vocab_size
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
        present = (columns < sizes + 2) & (sizes > 0)
        ids[present & (columns == 0)] = self._special.bos
        ids[present & (columns == sizes + 1)] = self._special.eos
        return self._masked(step, purpose, row, ids, present)

    def pairs(
        self, step: int, row: np.ndarray, starts: np.ndarray, sizes: np.ndarray
    ) -> MaskedBatch:
        """Rows bos A eos B eos, A from the document in the middle of each window."""
        space = self._shape[1] - 3
        draws = draw(self._seed, step, _PAIRS, 3 * self._shape[0]).reshape(3, -1, 1)[:, row]
        follows, a, a_start, b, b_start = self._split(draws, starts, sizes, space)
        columns = np.arange(self._shape[1])
        in_a = (columns >= 1) & (columns <= a)
        in_b = (columns >= a + 2) & (columns <= a + b + 1)
        places = np.where(in_a, a_start + columns - 1, b_start + columns - a - 2)
        ids = self._gather(places, in_a | in_b)
        present = (columns <= a + b + 2) & (a > 0)
        ids[present & (columns == 0)] = self._special.bos
        ids[present & ((columns == a + 1) | (columns == a + b + 2))] = self._special.eos
        batch = self._masked(step, _MASKS, row, ids, present)
        types = (present & (columns > a + 1)).astype(np.int32)
        return batch._replace(types=types, follows=follows[:, 0].astype(np.int32))

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
        place = _below(other, total - (end - begin))
        place += np.where(place >= begin, end - begin, 0)  # past the document of A
        other_begin, other_end = document_bounds(tokens, place)
        # No longer than what would follow, so that the length does not tell the two apart.
        b = np.minimum(np.maximum(run - a, a > 0), other_end - other_begin)
        b_start = np.minimum(place, other_end - b)
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
        self, step: int, purpose: int, row: np.ndarray, ids: np.ndarray, present: np.ndarray
    ) -> MaskedBatch:
        rows, length = self._shape
        most = max(1, round(self._rate * length))
        draws = draw(self._seed, step, purpose, rows * (length + 2 * most))
        keys = draws[: rows * length].reshape(rows, length)[row] >> np.uint64(1)
        fates, others = draws[rows * length :].reshape(2, rows, most)[:, row]
        candidates = present & ~np.isin(ids, self._specials)
        keys[~candidates] = np.iinfo(np.uint64).max
        wanted = np.maximum(np.rint(self._rate * present.sum(1)), 1)
        valid = np.arange(most) < np.minimum(wanted, candidates.sum(1))[:, None]
        at = np.argsort(keys, axis=1, kind="stable")[:, :most]
        at = np.where(valid, np.sort(np.where(valid, at, length), axis=1), 0)
        originals = np.take_along_axis(ids, at, axis=1)
        tenth = fates % np.uint64(10)
        random = self._ordinary[_below(others, len(self._ordinary))]
        hidden = np.where(tenth < 8, self._special.mask, np.where(tenth == 8, random, originals))
        tokens = ids.copy()
        np.put_along_axis(tokens, at, np.where(valid, hidden, originals).astype(np.int32), axis=1)
        return MaskedBatch(
            tokens,
            present,
            np.zeros_like(ids),
            at.astype(np.int32),
            np.where(valid, originals, 0).astype(np.int32),
            valid,
            row.astype(np.int32),
            np.zeros(len(row), np.int32),
        )


def _below(draws: np.ndarray, limit: np.ndarray | int) -> np.ndarray:
    """`draws` brought to 0 .. limit - 1, int64."""
    return (draws % np.asarray(limit).astype(np.uint64)).astype(np.int64)
