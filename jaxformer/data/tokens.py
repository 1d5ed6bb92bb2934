"""Sequences of ids, tokenised once and kept in one flat file that is mapped, not loaded.

The file: a header of 64 bytes (magic, version, bytes per id, number of sequences, number of ids),
the ids (unsigned, little-endian, padded to 8 bytes), and the offsets (int64, one more than
sequences).
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxformer.config import ConfigError
from jaxformer.tokenizers import DataError, Tokenizer

_HEADER = struct.Struct("<16sIIqq24x")
_MAGIC, _VERSION = b"jaxformer tokens", 1
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_CHUNK = 1 << 20
_LINES_AT_ONCE = 10_000


class Tokens:
    """Sequences of ids: sequence i is `ids[offsets[i]:offsets[i + 1]]`.

    `ids` [total] unsigned integers, `offsets` [sequences + 1] int64; both may be memory-mapped.
    """

    def __init__(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(ids):
            raise DataError(f"offsets must lead from 0 to the number of ids, {len(ids)}")
        if np.any(np.diff(offsets) < 0):
            raise DataError("offsets must not decrease")
        self.ids = ids
        self.offsets = offsets

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
        """SHA-256 (hex) of ids and offsets, the same in memory and on disk."""
        digest = hashlib.sha256(np.asarray(self.offsets, "<i8").tobytes())
        for start in range(0, len(self.ids), _CHUNK):
            digest.update(self.ids[start : start + _CHUNK].astype("<u4").tobytes())
        return digest.hexdigest()


def write_tokens(
    path: str | os.PathLike[str], sequences: Iterable[Sequence[int]], *, vocab_size: int
) -> Tokens:
    """The sequences, written to the file `path` (whole or not at all) and opened from there.

    Two bytes an id up to a vocabulary of 65,536, four above. Raises `DataError` for an id
    outside 0 to vocab_size - 1, `ConfigError` for a vocabulary that four bytes cannot hold.
    """
    if not 1 <= vocab_size <= 1 << 32:
        raise ConfigError(f"vocab_size must be 1 to 2^32, got {vocab_size}")
    path = Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with open(unfinished, "wb") as file:
            _write(file, sequences, vocab_size)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return open_tokens(path)


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
    magic, version, width, count, total = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if magic != _MAGIC or version != _VERSION or width not in _DTYPES or min(count, total) < 0:
        raise DataError(f"{path}: not a token file of version {_VERSION}; prepare the data again")
    start = _HEADER.size + total * width + -total * width % 8
    stop = start + 8 * (count + 1)
    if len(raw) != stop:
        raise DataError(f"{path}: {stop} bytes needed, {len(raw)} found; prepare the data again")
    ids = raw[_HEADER.size : _HEADER.size + total * width].view(_DTYPES[width])
    try:
        return Tokens(ids, raw[start:stop].view("<i8"))
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


def _write(file: BinaryIO, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
    dtype = _DTYPES[2 if vocab_size <= 1 << 16 else 4]
    file.write(bytes(_HEADER.size))
    offsets = [0]
    for i, sequence in enumerate(sequences):
        row = _checked(sequence, i, vocab_size)
        file.write(row.astype(dtype).tobytes())
        offsets.append(offsets[-1] + len(row))
    total = offsets[-1]
    file.write(bytes(-total * dtype.itemsize % 8))
    file.write(np.asarray(offsets, "<i8").tobytes())
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, len(offsets) - 1, total))


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
