"""Sequences of ids, tokenised once and kept in one flat file that is mapped, not loaded.

The file: a header of 64 bytes (magic, version, bytes per id, number of sequences, number of ids,
size of the vocabulary), the ids (unsigned, little-endian, padded to 8 bytes), the offsets (int64,
one more than sequences), and the fingerprint (32 bytes). Version 1 had neither vocabulary nor
fingerprint; it is still read.
"""

import hashlib
import os
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.tokenizers import DataError, Tokenizer

_HEADER = struct.Struct("<16sIIqqq16x")
_MAGIC, _VERSION = b"jaxformer tokens", 2
_DIGEST = 32
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_CHUNK = 1 << 16
_LINES_AT_ONCE = 10_000


class Tokens:
    """Sequences of ids: sequence i is `ids[offsets[i]:offsets[i + 1]]`.

    `ids` [total] unsigned integers, `offsets` [sequences + 1] int64; both may be memory-mapped.
    `vocab_size`: all ids were below it when they were written; None where that is not known.
    `fingerprint`: what the property gives, where it is known already.
    """

    def __init__(
        self,
        ids: np.ndarray,
        offsets: np.ndarray,
        *,
        vocab_size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids):
            raise DataError(f"offsets must lead from 0 to the number of ids, {len(ids)}")
        for start in range(0, len(offsets), _CHUNK):
            if np.any(np.diff(offsets[start : start + _CHUNK + 1]) < 0):
                raise DataError("offsets must not decrease")
        self.ids = ids
        self.offsets = offsets
        self.vocab_size = vocab_size
        self._fingerprint = fingerprint

    @classmethod
    def from_lists(cls, sequences: Iterable[Sequence[int]]) -> "Tokens":
        """The same in memory; `DataError` for an id that is not an integer of 0 to 2^32 - 1."""
        rows = [_checked(row, i, 1 << 32) for i, row in enumerate(sequences)]
        offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        ids = np.concatenate([np.empty(0, np.uint32), *rows]).astype(np.uint32)
        return cls(ids, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """The ids of one sequence, a copy [length] int32."""
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        return self.ids[self.offsets[index] : self.offsets[index + 1]].astype(np.int32)

    @property
    def lengths(self) -> np.ndarray:
        """[sequences] int64: the number of ids of each, without `<bos>` and `<eos>`."""
        return np.diff(self.offsets)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of offsets and ids, the same in memory and on disk.

        A file carries it, so that a corpus of many GB is read through only when it is written.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for values, kind in ((self.offsets, "<i8"), (self.ids, "<u4")):
                for start in range(0, len(values), _CHUNK):
                    digest.update(values[start : start + _CHUNK].astype(kind))
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def take(self, places: np.ndarray) -> np.ndarray:
        """The ids at `places` of the whole, in the shape of `places`, int32.

        Raises `DataError` for an id outside the vocabulary, which a damaged file may hold.
        """
        ids = self.ids[places].astype(np.int32)
        if self.vocab_size is not None and ids.size and not ids.max() < self.vocab_size:
            raise DataError(
                f"id {ids.max()} is outside the vocabulary of {self.vocab_size} ids that the "
                "tokens were written for: the file is damaged; prepare the data again"
            )
        return ids


def write_tokens(
    path: str | os.PathLike[str], sequences: Iterable[Sequence[int]], *, vocab_size: int
) -> Tokens:
    """The sequences, written to the file `path` (whole or not at all) and opened from there.

    Two bytes an id up to a vocabulary of 65,536, four above. Raises `DataError` for an id
    outside 0 to vocab_size - 1, `ConfigError` for a vocabulary that four bytes cannot hold.
    """
    if not 1 <= vocab_size <= 1 << 32:
        raise ConfigError(f"vocab_size must be 1 to 2^32, got {vocab_size}")
    return write_parts(path, ((row, True) for row in sequences), vocab_size=vocab_size)


def open_tokens(path: str | os.PathLike[str]) -> Tokens:
    """The sequences of a file that `write_tokens` made, memory-mapped for reading.

    Raises `DataError` for a file that is absent, of another kind, cut short or damaged in its
    offsets.
    """
    try:
        raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise DataError(f"{path}: cannot open the token file: {error}") from error
    if len(raw) < _HEADER.size:
        raise DataError(f"{path}: not a token file: {len(raw)} bytes are less than its header")
    header = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    magic, version, width, count, total, vocab_size = header
    known = magic == _MAGIC and version in (1, _VERSION) and width in _DTYPES
    if not known or min(count, total, vocab_size) < 0:
        raise DataError(f"{path}: not a token file of version {_VERSION}; prepare the data again")
    start = _HEADER.size + total * width + -total * width % 8
    stop = start + 8 * (count + 1)
    size = stop if version == 1 else stop + _DIGEST
    if len(raw) != size:
        raise DataError(f"{path}: {size} bytes needed, {len(raw)} found; prepare the data again")
    ids = raw[_HEADER.size : _HEADER.size + total * width].view(_DTYPES[width])
    facts = {"vocab_size": vocab_size or None, "fingerprint": raw[stop:].tobytes().hex() or None}
    try:
        return Tokens(ids, raw[start:stop].view("<i8"), **facts)
    except DataError as error:
        raise DataError(f"{path}: {error}; prepare the data again") from error


def encode_lines(
    lines: Sequence[str], tokenizer: Tokenizer, path: str | os.PathLike[str]
) -> Tokens:
    """The ids of every line, written to `path`; a line of white space only has no ids."""
    return write_tokens(path, _encode(lines, tokenizer), vocab_size=tokenizer.vocab_size)


def encode_pairs(
    source_lines: Sequence[str],
    target_lines: Sequence[str],
    tokenizer: Tokenizer,
    folder: str | os.PathLike[str],
    *,
    target_tokenizer: Tokenizer | None = None,
) -> tuple[Tokens, Tokens]:
    """The ids of both sides, in `source.tokens` and `target.tokens` of `folder`, none dropped.

    `target_tokenizer` None means one vocabulary for both. Raises `DataError` when the numbers of
    lines differ.
    """
    if len(source_lines) != len(target_lines):
        raise DataError(
            f"{len(source_lines)} source lines and {len(target_lines)} target lines: "
            "line i of one must translate line i of the other"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = encode_lines(source_lines, tokenizer, folder / "source.tokens")
    target = encode_lines(target_lines, target_tokenizer or tokenizer, folder / "target.tokens")
    return source, target


def _encode(lines: Sequence[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    for start in range(0, len(lines), _LINES_AT_ONCE):
        chunk = lines[start : start + _LINES_AT_ONCE]
        yield from tokenizer.encode_batch([line if line.strip() else "" for line in chunk])


def write_parts(
    path: str | os.PathLike[str], parts: Iterable[tuple[Sequence[int], bool]], *, vocab_size: int
) -> Tokens:
    """As `write_tokens`, of sequences that come in parts: ids, and whether they end a sequence.

    The ids of one sequence need never be in memory together.
    """
    if not 1 <= vocab_size <= 1 << 32:
        raise ConfigError(f"vocab_size must be 1 to 2^32, got {vocab_size}")
    path = Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with open(unfinished, "wb") as file:
            _write(file, parts, vocab_size)
        written = open_tokens(unfinished)
        fingerprint = Tokens(written.ids, written.offsets).fingerprint
        with open(unfinished, "r+b") as file:
            file.seek(-_DIGEST, os.SEEK_END)
            file.write(bytes.fromhex(fingerprint))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return open_tokens(path)


def _write(file: BinaryIO, parts: Iterable[tuple[Sequence[int], bool]], vocab_size: int) -> None:
    """The whole file, but for the fingerprint."""
    dtype = _DTYPES[2 if vocab_size <= 1 << 16 else 4]
    file.write(bytes(_HEADER.size))
    offsets, total = array("q", [0]), 0
    for part, ends in parts:
        ids = _checked(part, len(offsets) - 1, vocab_size)
        file.write(ids.astype(dtype).tobytes())
        total += len(ids)
        if ends:
            offsets.append(total)
    file.write(bytes(-total * dtype.itemsize % 8))
    file.write(np.asarray(offsets, "<i8").tobytes())
    file.write(bytes(_DIGEST))
    file.seek(0)
    facts = dtype.itemsize, len(offsets) - 1, total, vocab_size
    file.write(_HEADER.pack(_MAGIC, _VERSION, *facts))


def _checked(sequence: Sequence[int], index: int, vocab_size: int) -> np.ndarray:
    row = np.asarray(sequence)
    if row.ndim == 1 and row.size == 0:
        return np.empty(0, np.int64)
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise DataError(f"sequence {index} must be a list of integers, got {sequence!r:.60}")
    if row.min() < 0 or row.max() >= vocab_size:
        raise DataError(
            f"sequence {index}: ids must be 0 to {vocab_size - 1}, "
            f"got {row.min()} to {row.max()}; is it the right tokenizer?"
        )
    return row
