"""Sequences of ids, in memory or memory-mapped."""

import hashlib
import os
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, Integer

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data.id_files import JoinedIds, open_id_files
from jaxformer.text.data.token_rows import MOST_IDS, checked_ids, numbered_rows

_CHUNK = 1 << 16


class Tokens:
    """Sequences of ids: sequence i is `ids[offsets[i]:offsets[i + 1]]`.

    `ids` and `offsets` (int64) may be memory-mapped. All ids are below `vocab_size`; None means
    that no vocabulary is known. A document is a sequence; with `document_id` this id separates
    documents, and the files that it came with need no index of them. `fingerprint` is the value of
    the property, where it is known. Raises `DataError` for offsets that do not fit and for negative
    ids.

    >>> tokens = Tokens.from_lists([[5, 6, 7], [8]], vocab_size=9)
    >>> len(tokens), tokens[1].tolist(), tokens.lengths.tolist()
    (2, [8], [3, 1])
    >>> tokens.offsets.tolist()
    [0, 3, 4]
    """

    def __init__(
        self,
        ids: Integer[np.ndarray, " total"] | JoinedIds,
        offsets: Int64[np.ndarray, " sequences+1"],
        *,
        vocab_size: int | None = None,
        fingerprint: str | None = None,
        document_id: int | None = None,
    ) -> None:
        if isinstance(ids, np.ndarray):
            _check_ids(ids)
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids):
            raise DataError(f"offsets must start at 0 and end at the number of ids, {len(ids)}")
        for start in range(0, len(offsets), _CHUNK):
            if np.any(np.diff(offsets[start : start + _CHUNK + 1]) < 0):
                raise DataError("offsets must not decrease")
        self.ids = ids
        self.offsets = offsets
        self.vocab_size = vocab_size
        self.document_id = document_id
        self._fingerprint = fingerprint

    @classmethod
    def open(
        cls,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        document_id: int | None = None,
        vocab_size: int | None = None,
    ) -> "Tokens":
        """The ids in files that other programs wrote, memory-mapped, as one sequence.

        The files are nanoGPT's and llm.c's .bin and integers in .npy (`text.data.id_files`); a
        path may be a pattern such as 'fineweb/*_train_*.bin', whose files follow each other by
        name. `document_id` is the id before or after each document, such as 50256 in GPT-2's ids;
        None: all is one document. An id outside `vocab_size` is found when it is read. The
        fingerprint is made from names, sizes, headers and samples. Raises `DataError` for a file
        that is absent, empty, cut short or of another kind.

        >>> np.array([50256, 318, 262, 50256, 640], np.uint16).tofile("two.bin")
        >>> tokens = Tokens.open("*.bin", document_id=50256)
        >>> tokens.ids[1:3].tolist(), tokens.document_id
        ([318, 262], 50256)
        """
        limit = MOST_IDS if vocab_size is None else vocab_size
        if document_id is not None and not 0 <= document_id < limit:
            raise ConfigError(
                f"document_id={document_id}, but it must be 0 to {limit - 1}, an id of the "
                "vocabulary"
            )
        return cls._of_files(open_id_files(paths), document_id, vocab_size)

    @classmethod
    def _of_files(cls, ids: JoinedIds, document_id: int | None, vocab_size: int | None) -> "Tokens":
        offsets = np.array([0, len(ids)], np.int64)
        return cls(ids, offsets, vocab_size=vocab_size, document_id=document_id)

    def between(self, start: int, stop: int) -> "Tokens":
        """The ids from the place `start` up to `stop` of files of ids; nothing is read."""
        if not isinstance(self.ids, JoinedIds):
            raise TypeError("only ids that `Tokens.open` has opened are cut by place")
        return self._of_files(self.ids.between(start, stop), self.document_id, self.vocab_size)

    @classmethod
    def from_lists(
        cls, sequences: Iterable[Sequence[int]], *, vocab_size: int | None = None
    ) -> "Tokens":
        """The sequences in memory; `DataError` for an id outside 0 to vocab_size - 1.

        Without `vocab_size` ids may be up to 2^31 - 1.
        """
        limit = MOST_IDS if vocab_size is None else vocab_size
        rows = list(numbered_rows((row, True) for row in sequences))
        offsets = np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int64)
        return cls(checked_ids(rows, limit).astype(np.uint32), offsets, vocab_size=vocab_size)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Int32[np.ndarray, " length"]:
        """A copy of the ids of one sequence."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.take(np.arange(self.offsets[index], self.offsets[index + 1]))

    @property
    def lengths(self) -> Int64[np.ndarray, " sequences"]:
        """The number of ids of each sequence, without `<bos>` and `<eos>`."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of ids and offsets, the same in memory and on disk; a file stores it.

        For files that other programs wrote it is made from names, sizes, headers and samples.
        """
        if self._fingerprint is None:
            self._fingerprint = self._compute_fingerprint()
        return self._fingerprint

    def _compute_fingerprint(self) -> str:
        if isinstance(self.ids, JoinedIds):
            return hashlib.sha256(f"{self.ids.fingerprint} {self.document_id}".encode()).hexdigest()
        digest = hashlib.sha256()
        for values, kind in ((self.ids, "<u4"), (self.offsets, "<i8")):
            for start in range(0, len(values), _CHUNK):
                digest.update(values[start : start + _CHUNK].astype(kind).tobytes())
        return digest.hexdigest()

    def count(self, token: int) -> int:
        """The number of ids that are `token`; all are read."""
        starts = range(0, len(self.ids), _CHUNK)
        return sum(int(np.count_nonzero(self.ids[i : i + _CHUNK] == token)) for i in starts)

    def take(self, places: Int[np.ndarray, "*shape"]) -> Int32[np.ndarray, "*shape"]:
        """The ids at `places`, counted over all sequences.

        Raises `DataError` for an id outside the vocabulary, which a damaged file may hold.
        """
        ids = self.ids[places]
        if self._has_wrong(ids):
            where = np.asarray(places)[self._is_wrong(ids)]
            raise self._wrong_id(int(where.flat[0]))
        return ids.astype(np.int32)

    def rows(
        self, starts: Int64[np.ndarray, " B"], counts: Int64[np.ndarray, " B"], length: int
    ) -> Int32[np.ndarray, "B length"]:
        """Rows of ids: `counts` of them from each of `starts` on, counted over all sequences, then
        zeros.

        Raises `DataError` as `take` does.
        """
        out = np.zeros((len(starts), length), np.int32)
        for row, start, count in zip(out, starts.tolist(), counts.tolist(), strict=True):
            if isinstance(self.ids, JoinedIds):
                self.ids.copy(start, row[:count])
            else:
                row[:count] = self.ids[start : start + count]
        if self._has_wrong(out):
            row, column = np.argwhere(self._is_wrong(out))[0]
            raise self._wrong_id(int(starts[row] + column))
        return out

    def _has_wrong(self, ids: Integer[np.ndarray, "*shape"]) -> bool:
        """Whether an id is outside the vocabulary: faster than `_is_wrong`."""
        return bool(ids.size and (ids.max() >= self._limit or ids.min() < 0))

    def _is_wrong(self, ids: Integer[np.ndarray, "*shape"]) -> Bool[np.ndarray, "*shape"]:
        return (ids < 0) | (ids >= self._limit)

    @property
    def _limit(self) -> int:
        return MOST_IDS if self.vocab_size is None else self.vocab_size

    def _wrong_id(self, place: int) -> DataError:
        """The error for the id at `place`, which is outside the vocabulary."""
        if isinstance(self.ids, JoinedIds):
            return DataError(
                f"{self.ids.where(place)}: {self.ids.exact(place)} is outside the vocabulary of "
                f"{self._limit} ids: give the tokenizer that made the ids, or other files"
            )
        return DataError(
            f"id {self.ids[place]} is outside the vocabulary of {self._limit} ids that the tokens "
            "were written for: the file is damaged; prepare the data again"
        )


def _check_ids(ids: np.ndarray) -> None:
    """Raises `DataError` unless `ids` are integers from 0."""
    if ids.dtype.kind != "u" and ids.size and (ids.dtype.kind != "i" or ids.min() < 0):
        least = f", {ids.min()} among them" if ids.dtype.kind == "i" else ""
        raise DataError(f"ids must be integers from 0, got {ids.dtype}{least}")
