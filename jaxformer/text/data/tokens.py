"""Sequences of ids, tokenised once and kept in one flat file that is memory-mapped.

The file: a header of 64 bytes (magic, version, bytes per id, number of sequences, number of ids,
size of the vocabulary), the ids (unsigned, little-endian, padded to 8 bytes), the offsets (int64,
one more than sequences), and the fingerprint (32 bytes).
"""

import hashlib
import os
import shutil
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, Integer

from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.storage import replacing
from jaxformer.text.data.id_files import JoinedIds, open_id_files
from jaxformer.text.data.text_files import BLOCK_LENGTH
from jaxformer.text.tokenizers import Tokenizer, check_list


class _Row(NamedTuple):
    """A part of a sequence."""

    ids: np.ndarray
    number: int
    """The number of the sequence."""
    ends: bool
    """Whether the sequence ends with it."""


Item = TypeVar("Item", str, tuple[str, bool], _Row)

_HEADER = struct.Struct("<16sIIqqq16x")
_MAGIC, _VERSION = b"jaxformer tokens", 3
_DIGEST = 32
_DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_CHUNK = 1 << 16
_MOST_IDS = 1 << 31  # batches hold ids as int32
_TEXTS_AT_ONCE = 10_000
_CHARACTERS_AT_ONCE = max(8, 2 * (os.cpu_count() or 1)) * BLOCK_LENGTH  # blocks for each core
_IDS_AT_ONCE = 1 << 13
_PART = 1 << 23
"""Bytes of text whose ids are kept as soon as they are known, for another start."""

Progress = Callable[[int], None]
"""Called with the number of bytes of text that are encoded."""


class TextEncoder(Protocol):
    """An encoder of texts to ids, such as a `Tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    def encode_batch(self, lines: list[str], /) -> list[list[int]]:
        """The ids of each text."""
        ...


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
        limit = _MOST_IDS if vocab_size is None else vocab_size
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
        limit = _MOST_IDS if vocab_size is None else vocab_size
        rows = list(_numbered_rows((row, True) for row in sequences))
        offsets = np.cumsum([0, *(len(row.ids) for row in rows)], dtype=np.int64)
        return cls(_checked(rows, limit).astype(np.uint32), offsets, vocab_size=vocab_size)

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
        return _MOST_IDS if self.vocab_size is None else self.vocab_size

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


def write_tokens(
    path: str | os.PathLike[str], sequences: Iterable[Sequence[int]], *, vocab_size: int
) -> Tokens:
    """Writes the sequences to the file `path`, completely or not at all, and opens it.

    Two bytes an id up to a vocabulary of 65,536, four above. Raises `DataError` for an id
    outside 0 to vocab_size - 1, `ConfigError` for a vocabulary of more than 2^31 ids.
    """
    return _write_parts(path, ((row, True) for row in sequences), vocab_size=vocab_size)


def _write_parts(
    path: str | os.PathLike[str],
    parts: Iterable[tuple[Sequence[int] | np.ndarray, bool]],
    *,
    vocab_size: int,
) -> Tokens:
    """Like `write_tokens`, for parts of sequences: ids, and whether they end a sequence.

    Not even one sequence has to fit in memory.
    """
    if not 1 <= vocab_size <= _MOST_IDS:
        raise ConfigError(f"vocab_size must be 1 to 2^31, got {vocab_size}")
    dtype = _DTYPES[2 if vocab_size <= 1 << 16 else 4]
    offsets, total, digest = array("q", [0]), 0, hashlib.sha256()
    with replacing(path) as unfinished, open(unfinished, "wb") as file:
        file.write(bytes(_HEADER.size))
        for group in _groups(_numbered_rows(parts), lambda _, size: size >= _IDS_AT_ONCE):
            ids = _checked(group, vocab_size)
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
        sizes = dtype.itemsize, len(offsets) - 1, total, vocab_size
        file.write(_HEADER.pack(_MAGIC, _VERSION, *sizes))
    return open_tokens(path)


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


def encode_lines(
    lines: Sequence[str],
    tokenizer: TextEncoder,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Tokens:
    """Writes the ids of every line to `path`; a line of white space only has no ids."""
    check_list("lines", lines)
    texts = ((line if line.strip() else "", True) for line in lines)
    return _write_encoded(path, texts, tokenizer, [], [], progress)


def encode_pairs(
    source_lines: Sequence[str],
    target_lines: Sequence[str],
    tokenizer: TextEncoder,
    folder: str | os.PathLike[str],
    *,
    target_tokenizer: TextEncoder | None = None,
    progress: Progress | None = None,
) -> tuple[Tokens, Tokens]:
    """Writes the ids of all pairs to `source.tokens` and `target.tokens` in `folder`.

    `target_tokenizer` None means one vocabulary for both. Raises `DataError` when the numbers of
    lines differ.
    """
    for name, lines in (("source lines", source_lines), ("target lines", target_lines)):
        check_list(name, lines)
    if len(source_lines) != len(target_lines):
        raise DataError(
            f"{len(source_lines)} source lines and {len(target_lines)} target lines: "
            "line i of one must translate line i of the other"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    source = encode_lines(source_lines, tokenizer, folder / "source.tokens", progress)
    target = encode_lines(
        target_lines, target_tokenizer or tokenizer, folder / "target.tokens", progress
    )
    return source, target


def encode_documents(
    documents: Iterable[Iterable[str]],
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    *,
    isolate_documents: bool,
    progress: Progress | None = None,
) -> Tokens:
    """Writes the ids of each document to the file `path` as one sequence, and opens it.

    If this is stopped, the next call for the same `path` goes on after the last 8 MB of text whose
    ids are known. They are kept beside the file, in a folder that ends in `.parts`, until it ends.

    With `isolate_documents` bos and eos are put around the ids, where the vocabulary has them. A
    document is a text or an iterable of blocks of text. Each block is encoded separately, so use a
    tokenizer that adds no space before a text. Only a few blocks are in memory at a time.

    >>> tokenizer = jf.train_bpe(["a rose is a rose"], 270, prefix="")
    >>> tokens = encode_documents([["a ro", "se"]], tokenizer, "a.tokens", isolate_documents=True)
    >>> ids = tokens[0].tolist()
    >>> ids[0] == jf.BOS, ids[-1] == jf.EOS, tokenizer.decode(ids)
    (True, True, 'a rose')
    """
    check_list("documents", documents)
    special = tokenizer.special
    bos, eos = (special.bos, special.eos) if isolate_documents else (None, None)
    before, after = ([] if id is None else [id] for id in (bos, eos))
    return _write_encoded(path, _parts(documents), tokenizer, before, after, progress)


def _write_encoded(
    path: str | os.PathLike[str],
    texts: Iterator[tuple[str, bool]],
    tokenizer: TextEncoder,
    before: list[int],
    after: list[int],
    progress: Progress | None,
) -> Tokens:
    """Writes the ids of sequences of `texts`, each with whether a sequence ends there."""
    kept = Path(path).with_suffix(".parts")

    def parts() -> Iterator[tuple[np.ndarray, bool]]:
        start, done = True, 0
        for group in _groups(texts, lambda group, size: size >= _PART):
            ids, lengths, size = _encode_group([text for text, _ in group], tokenizer, kept)
            stops = np.cumsum(lengths).tolist()
            for stop, length, (_, ends) in zip(stops, lengths.tolist(), group, strict=True):
                row = ids[stop - length : stop]
                if start and before:
                    row = np.concatenate([np.array(before, row.dtype), row])
                if ends and after:
                    row = np.concatenate([row, np.array(after, row.dtype)])
                yield row, ends
                start = ends
            done += size
            if progress is not None:
                progress(done)

    tokens = _write_parts(path, parts(), vocab_size=tokenizer.vocab_size)
    shutil.rmtree(kept, ignore_errors=True)
    return tokens


def _encode_group(
    texts: list[str], tokenizer: TextEncoder, kept: Path
) -> tuple[np.ndarray, np.ndarray, int]:
    """The ids of all texts, the number of each text's, and the bytes of the texts.

    They are kept in `kept` where the texts are a whole part.
    """
    digest, size = hashlib.sha256(), 0
    for text in texts:
        raw = text.encode(errors="surrogatepass")  # the tokenizer refuses them by their place
        digest.update(b"%d " % len(raw) + raw)
        size += len(raw)
    path = kept / f"{digest.hexdigest()}.npz"
    with suppress(OSError, ValueError, LookupError, EOFError, BadZipFile):
        with np.load(path) as stored:
            return stored["ids"], stored["lengths"], size
    blocks: list[np.ndarray] = []
    counts: list[int] = []
    for batch in _groups(iter(texts), _is_batch):
        rows = [np.array(row, np.uint32) for row in tokenizer.encode_batch(batch)]
        blocks.append(np.concatenate(rows))
        counts += map(len, rows)
    ids, lengths = np.concatenate(blocks), np.array(counts)
    if size >= _PART:
        kept.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, ids=ids, lengths=lengths)
    return ids, lengths, size


def _parts(documents: Iterable[Iterable[str]]) -> Iterator[tuple[str, bool]]:
    """The blocks of all documents, and whether a document ends with each."""
    for document in documents:
        blocks = iter([document] if isinstance(document, str) else document)
        block = next(blocks, "")
        for following in blocks:
            yield block, False
            block = following
        yield block, True


def _is_batch(texts: list[Any], characters: int) -> bool:
    """Whether the tokenizer encodes `texts` at once."""
    return len(texts) == _TEXTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE


def _groups(
    items: Iterator[Item], is_full: Callable[[list[Item], int], bool]
) -> Iterator[list[Item]]:
    """`items`, texts or pairs that begin with one, in lists that `is_full` (list, characters)."""
    group: list[Item] = []
    characters = 0
    for item in items:
        group.append(item)
        characters += len(item if isinstance(item, str) else item[0])
        if is_full(group, characters):
            yield group
            group, characters = [], 0
    if group:
        yield group


def _check_ids(ids: np.ndarray) -> None:
    """Raises `DataError` unless `ids` are integers from 0."""
    if ids.dtype.kind != "u" and ids.size and (ids.dtype.kind != "i" or ids.min() < 0):
        least = f", {ids.min()} among them" if ids.dtype.kind == "i" else ""
        raise DataError(f"ids must be integers from 0, got {ids.dtype}{least}")


def _numbered_rows(
    parts: Iterable[tuple[Sequence[int] | np.ndarray, bool]],
) -> Iterator[_Row]:
    """Each of `parts` as an array, with the number of its sequence.

    Raises `DataError` for a part that is no list of integers.
    """
    number = 0
    for part, ends in parts:
        row = np.asarray(part)
        if row.ndim == 1 and row.size == 0:
            row = np.empty(0, np.int64)
        if row.ndim != 1 or row.dtype.kind not in "iu":
            raise DataError(
                f"sequence {number} must be a list of integers, got {shorten(repr(part))}"
            )
        yield _Row(row, number, ends)
        number += ends


def _checked(rows: Sequence[_Row], vocab_size: int) -> Int64[np.ndarray, " ids"]:
    """The ids of all `rows`; `DataError`, with its number, for the first one with a wrong id."""
    # An id from 2^63 on becomes negative, which is wrong as well.
    arrays = [np.empty(0, np.int64), *(row.ids for row in rows)]
    ids = np.concatenate(arrays, dtype=np.int64, casting="unsafe")
    if _is_outside(ids, vocab_size):
        wrong = next(row for row in rows if _is_outside(row.ids, vocab_size))
        raise DataError(
            f"sequence {wrong.number}: ids must be 0 to {vocab_size - 1}, "
            f"got {wrong.ids.min()} to {wrong.ids.max()}; is it the right tokenizer?"
        )
    return ids


def _is_outside(row: Integer[np.ndarray, " ids"], vocab_size: int) -> bool:
    """Whether an id of `row` is none of the vocabulary's."""
    return bool(row.size and (row.min() < 0 or row.max() >= vocab_size))
