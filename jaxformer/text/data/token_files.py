"""Sequences of ids in one flat file, which is written once and memory-mapped.

The file: a header of 64 bytes (magic, version, bytes per id, number of sequences, number of ids,
size of the vocabulary), the ids (unsigned, little-endian, padded to 8 bytes), the offsets (int64,
one more than sequences), and the fingerprint (32 bytes).
"""

import hashlib
import os
import struct
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from jaxformer.errors import ConfigError, DataError
from jaxformer.storage import replacing
from jaxformer.text.data.groups import in_groups
from jaxformer.text.data.token_rows import MOST_IDS, Row, checked_ids, numbered_rows
from jaxformer.text.data.tokens import Tokens

_HEADER = struct.Struct("<16sIIqqq16x")
_MAGIC, _VERSION = b"jaxformer tokens", 3
_DIGEST = 32
_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_IDS_AT_ONCE = 1 << 13


def write_tokens(
    path: str | os.PathLike[str], sequences: Iterable[Sequence[int]], *, vocab_size: int
) -> Tokens:
    """Writes the sequences to the file `path`, completely or not at all, and opens it.

    Two bytes an id up to a vocabulary of 65,536, four above. Raises `DataError` for an id
    outside 0 to vocab_size - 1, `ConfigError` for a vocabulary of more than 2^31 ids.
    """
    return write_parts(path, ((row, True) for row in sequences), vocab_size=vocab_size)


def write_parts(
    path: str | os.PathLike[str],
    parts: Iterable[tuple[Sequence[int] | np.ndarray, bool]],
    *,
    vocab_size: int,
) -> Tokens:
    """Like `write_tokens`, for parts of sequences: ids, and whether they end a sequence.

    Not even one sequence has to fit in memory.
    """
    if not 1 <= vocab_size <= MOST_IDS:
        raise ConfigError(f"vocab_size must be 1 to 2^31, got {vocab_size}")
    dtype = _DTYPES[2 if vocab_size <= 1 << 16 else 4]
    offsets = array("q", [0])
    total = 0
    digest = hashlib.sha256()
    with replacing(path) as unfinished, open(unfinished, "wb") as file:
        file.write(bytes(_HEADER.size))
        for group in in_groups(numbered_rows(parts), _count_ids, _is_block):
            ids = checked_ids(group, vocab_size)
            file.write(ids.astype(dtype).tobytes())
            digest.update(ids.astype("<u4").tobytes())
            for row in group:
                total += len(row.ids)
                if row.ends:
                    offsets.append(total)
        file.write(bytes(-total * dtype.itemsize % 8))
        borders = np.asarray(offsets, "<i8").tobytes()
        digest.update(borders)
        file.write(borders + digest.digest())
        file.seek(0)
        header = _HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, len(offsets) - 1, total, vocab_size)
        file.write(header)
    return open_tokens(path)


def _count_ids(row: Row) -> int:
    return len(row.ids)


def _is_block(rows: list[Row], ids: int) -> bool:
    """Whether `rows` with so many `ids` are written at once."""
    return ids >= _IDS_AT_ONCE


def open_tokens(path: str | os.PathLike[str], *, vocab_size: int | None = None) -> Tokens:
    """The sequences of a file made by `write_tokens`, memory-mapped for reading.

    `vocab_size` is the model's. Raises `DataError` for a file that was written for
    a larger vocabulary, and for one that is absent, of another kind, cut short or damaged in its
    offsets.
    """
    try:
        raw = np.asarray(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise DataError(f"{path}: cannot open the token file: {error}") from error
    if len(raw) < _HEADER.size:
        raise DataError(f"{path}: not a token file: {len(raw)} bytes are less than its header")
    header = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    magic, version, width, count, total, written_for = header
    known = magic == _MAGIC and version == _VERSION and width in _DTYPES
    if not known or min(count, total, written_for) < 0:
        raise DataError(f"{path}: not a token file of version {_VERSION}; prepare the data again")
    if vocab_size is not None and written_for > vocab_size:
        raise DataError(
            f"{path} was written for {written_for} ids, up to the id {written_for - 1}, but "
            f"vocab_size={vocab_size}: encode the text with the model's own tokenizer"
        )
    start = _HEADER.size + total * width + -total * width % 8
    stop = start + 8 * (count + 1)
    if len(raw) != stop + _DIGEST:
        raise DataError(
            f"{path}: {stop + _DIGEST} bytes needed, {len(raw)} found; prepare the data again"
        )
    ids = raw[_HEADER.size : _HEADER.size + total * width].view(_DTYPES[width])
    digest = raw[stop:].tobytes().hex()
    try:
        return Tokens(ids, raw[start:stop].view("<i8"), vocab_size=written_for, fingerprint=digest)
    except DataError as error:
        raise DataError(f"{path}: {error}; prepare the data again") from error
