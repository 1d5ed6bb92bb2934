"""Files of ids that other programs wrote, memory-mapped: nothing of them is copied or converted.

.bin    nanoGPT: uint16, no header
.bin    llm.c, modded-nanogpt: a header of 256 int32, then uint16 (GPT-2) or uint32 (Llama 3)
.npy    one dimension of integers

All numbers are little-endian; the header of .npy names its own type. A file is told by its first
bytes, not by its name.
"""

import glob
import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32, Integer

from jaxformer import storage
from jaxformer.errors import DataError

_HEADER_BYTES = 256 * 4
_NUMPY = b"\x93NUMPY"
_KINDS: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
"""The type of the ids in a file with llm.c's header, by magic number and version."""
_VERSIONS = dict(_KINDS.keys())
_QUESTIONS = 20240522
"""The magic number of llm.c's files of multiple-choice questions."""
_ARCHIVES = {b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "compressed by gzip"}
_SAMPLES = 8
"""Places of a file that its fingerprint reads, evenly apart, from the first to the last."""
_SAMPLE = 4096
"""Bytes at each of them."""
_HALF_OF_32_BITS = 4
"""The upper half of an id of 32 bits is below this, for vocabularies up to 262,144 ids."""


class IdFile(NamedTuple):
    """The ids of one file."""

    path: Path
    ids: Integer[np.ndarray, " ids"]
    header: bytes
    """The bytes before the ids."""


class JoinedIds:
    """The ids of several files as one sequence.

    `len()` is their number; a slice, or an array of places, gives a copy of ids.
    """

    def __init__(self, files: Sequence[IdFile]) -> None:
        self.files = list(files)
        self._begins: list[int] = [0]
        for file in self.files:
            self._begins.append(self._begins[-1] + len(file.ids))

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, places: slice | Int[np.ndarray, "*shape"]) -> Int32[np.ndarray, "*shape"]:
        """The ids at `places`; a number that no int32 holds is negative."""
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice of ids has the step 1, got {step}")
            out = np.empty(max(stop - start, 0), np.int32)
            self.copy(start, out)
            return out
        out = np.empty(places.shape, np.int32)
        numbers = np.searchsorted(self._begins, places, side="right") - 1
        for number in np.unique(numbers):
            chosen = numbers == number
            out[chosen] = _narrow(self.files[number].ids[places[chosen] - self._begins[number]])
        return out

    def copy(self, start: int, out: Int32[np.ndarray, " count"]) -> None:
        """Fills `out` with the ids from the place `start` on, across the ends of files."""
        number, done = bisect_right(self._begins, start) - 1, 0
        while done < len(out):
            first = start + done - self._begins[number]
            ids = self.files[number].ids[first : first + len(out) - done]
            out[done : done + len(ids)] = _narrow(ids)
            done += len(ids)
            number += 1

    def where(self, place: int) -> str:
        """The file and the place in it of the id at `place`, for a message."""
        number = bisect_right(self._begins, place) - 1
        return f"{self.files[number].path}, id number {place - self._begins[number]:,} of the file"

    def exact(self, place: int) -> int:
        """The number at `place`, whatever its type can hold."""
        number = bisect_right(self._begins, place) - 1
        return int(self.files[number].ids[place - self._begins[number]])

    def between(self, start: int, stop: int) -> "JoinedIds":
        """The ids from the place `start` up to `stop`, of the same files."""
        kept = []
        for file, begin in zip(self.files, self._begins, strict=False):
            ids = file.ids[max(start - begin, 0) : max(stop - begin, 0)]
            if len(ids):
                kept.append(file._replace(ids=ids))
        return JoinedIds(kept)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of names (without folders), sizes, headers, and samples of the ids.

        A change between the samples that keeps the size is not seen.
        """
        digest = hashlib.sha256()
        for file in self.files:
            raw = file.ids.view(np.uint8) if file.ids.flags.c_contiguous else file.ids
            digest.update(repr((file.path.name, file.ids.dtype.str, len(file.ids))).encode())
            digest.update(file.header)
            for place in sample_places(len(raw)):
                digest.update(raw[place : place + _SAMPLE].tobytes())
        return digest.hexdigest()

    def sample(self) -> Int32[np.ndarray, " samples"]:
        """Ids at places all over the files, for what is said about the whole."""
        parts = [
            np.asarray(_narrow(file.ids[place : place + _SAMPLE]), np.int32)
            for file in self.files
            for place in sample_places(len(file.ids))
        ]
        return np.concatenate(parts)


def _narrow(ids: Integer[np.ndarray, " count"]) -> Integer[np.ndarray, " count"]:
    """`ids` as they are, or where they have 64 bits as int32, and -1 for what it cannot hold."""
    if ids.dtype.itemsize < 8:
        return ids
    narrow = ids.astype(np.int32)
    narrow[(ids < 0) | (ids > np.iinfo(np.int32).max)] = -1
    return narrow


def sample_places(size: int) -> list[int]:
    """The first places of samples of something of this size."""
    last = max(size - _SAMPLE, 0)
    return sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})


def open_id_files(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> JoinedIds:
    """The ids of the files `paths`, one after the other; a path may be a pattern such as 'a*.bin'.

    Raises `DataError`, with the file, for one that is absent, empty, cut short, or no file of ids.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [open_id_file(path) for pattern in given for path in expand(os.fspath(pattern))]
    if not files:
        raise DataError("no file of ids was given: give at least one")
    return JoinedIds(files)


def expand(pattern: str) -> list[Path]:
    """The files that `pattern` names, in the order of their names; a file itself is no pattern.

    Raises `DataError` for a pattern that names none.
    """
    path = storage.to_path(pattern)
    if storage.is_in_bucket(path):
        raise DataError(
            f"{pattern} is in a bucket, but files of ids are memory-mapped: copy them to this "
            "machine, and give the copies"
        )
    if path.exists() or not glob.has_magic(pattern):
        return [path]
    found = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not found:
        raise DataError(f"{pattern}: no file has such a name: check the folder and the pattern")
    return found


def open_id_file(path: Path) -> IdFile:
    """The ids of the file `path`, which is told by its first bytes."""
    try:
        with open(path, "rb") as file:
            start = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
        return _numpy_file(path) if start.startswith(_NUMPY) else _bin_file(path, start, size)
    except OSError as error:
        raise DataError(f"{path}: cannot read the file: {error.strerror or error}") from error


def _numpy_file(path: Path) -> IdFile:
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot read the array: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds an array of {ids.dtype} with the shape {ids.shape}, but ids are "
            "integers in one dimension: save `ids.reshape(-1)` as int32 or uint16"
        )
    return _not_empty(IdFile(path, np.asarray(ids), b""))


def _bin_file(path: Path, start: bytes, size: int) -> IdFile:
    for mark, name in _ARCHIVES.items():
        if start.startswith(mark):
            raise DataError(f"{path} is {name}, not a file of ids: unpack it first")
    magic, version = _first_numbers(start)
    if magic == _QUESTIONS:
        raise DataError(f"{path} holds llm.c's multiple-choice questions, not a text: leave it out")
    if magic in _VERSIONS:
        return _file_with_header(path, start, size)
    if path.suffix == ".npy":
        raise DataError(f"{path}: not a .npy file: it does not begin as numpy's files do")
    if size % 2:
        raise DataError(
            f"{path}: {size:,} bytes are no whole number of ids of 16 bits: the file is cut short, "
            "or is no file of ids"
        )
    file = _not_empty(IdFile(path, _mapped(path, np.dtype("<u2"), 0), b""))
    _check_flat(file, start)
    return file


def _first_numbers(start: bytes) -> tuple[int, int]:
    """The first two int32 of a header; zeros where the file is shorter."""
    first, second = np.frombuffer(start[:8].ljust(8, b"\0"), "<i4").tolist()
    return first, second


def _file_with_header(path: Path, header: bytes, size: int) -> IdFile:
    magic, version = _first_numbers(header)
    if (magic, version) not in _KINDS:
        raise DataError(
            f"{path}: the header has the magic number {magic} and the version {version}, but only "
            f"version {_VERSIONS[magic]} is known: write the file again with the scripts of llm.c"
        )
    dtype = _KINDS[magic, version]
    count = int.from_bytes(header[8:12], "little", signed=True)
    needed = _HEADER_BYTES + count * dtype.itemsize
    if len(header) < _HEADER_BYTES or count < 0 or size != needed:
        raise DataError(
            f"{path}: the header speaks of {count:,} ids, which need {needed:,} bytes, but the "
            f"file has {size:,}: it was cut short, so copy or write it again"
        )
    _check_count(path, count)
    return IdFile(path, _mapped(path, dtype, _HEADER_BYTES), header)


def _check_flat(file: IdFile, start: bytes) -> None:
    """Raises `DataError` for a file without a header that holds no ids of 16 bits.

    It knows text, and ids of 32 bits: every second number is then the upper half of an id.
    """
    ids = np.asarray(file.ids[:_SAMPLE])
    low, high = ids[::2], ids[1::2]
    if len(high) >= 8 and high.max() < _HALF_OF_32_BITS and low.max() >= 256:
        raise DataError(
            f"{file.path} seems to hold ids of 32 bits, but a .bin file without a header holds "
            "uint16: save them with numpy.save as .npy, which says its type"
        )
    if len(start) >= 16 and min(start) >= 9 and _is_utf_8(start):
        raise DataError(f"{file.path} holds text, not ids: give it the ending .txt")


def _is_utf_8(raw: bytes) -> bool:
    """Whether `raw` is UTF-8, but for a last character that is cut."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(raw) - 3
    return True


def _not_empty(file: IdFile) -> IdFile:
    _check_count(file.path, len(file.ids))
    return file


def _check_count(path: Path, count: int) -> None:
    if count == 0:
        raise DataError(f"{path} holds no ids: leave it out")


def _mapped(path: Path, dtype: np.dtype, offset: int) -> np.ndarray:
    """The numbers of a file from the byte `offset` on; an empty array where there are none."""
    if path.stat().st_size == offset:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset))
