"""Text files: their lines, and documents of any size, block by block."""

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Literal

from jaxformer.errors import ConfigError, DataError, shorten

BLOCK_LENGTH = 1 << 17  # characters; the tokenizer needs 70 MB for them, for 1 << 20 400 MB

_LEAST_UTF_16 = 8  # bytes of a line; a text may hold a NUL

_SPLITS = ("file", "line", "blank_line")

_BEGINNINGS = {
    rb"PK\x03\x04": "a zip archive, as .docx, .xlsx and .odt files are",
    rb"%PDF-": "a PDF document",
    rb"\{\\rtf": "an RTF document",
    rb"\xd0\xcf\x11\xe0": "an Office document in binary form",
    rb"\x1f\x8b": "compressed by gzip",
    rb"BZh\d1AY&SY": "compressed by bzip2",
    rb"\xfd7zXZ\x00": "compressed by xz",
    rb"\x28\xb5\x2f\xfd": "compressed by zstandard",
    rb"7z\xbc\xaf": "a 7z archive",
    rb"(?s:.{257})ustar": "a tar archive",
    rb"ARROW1|\xff{4}": "an Arrow file",
    rb"PAR1": "a Parquet file",
    rb"\x93NUMPY": "a NumPy array",
    rb"SQLite format 3\x00": "an SQLite database",
}
"""Regular expressions of the first bytes of files that are no text, and what these are."""


def other_format(beginning: bytes) -> str:
    """The format of a file that begins with the bytes `beginning`; "" for what may be text.

    >>> other_format(b"%PDF-1.7"), other_format(b"A rose is a rose.")
    ('a PDF document', '')
    """
    matches = (name for pattern, name in _BEGINNINGS.items() if re.match(pattern, beginning))
    return next(matches, "")


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of `iterate_lines` in a list."""
    return list(iterate_lines(path))


def iterate_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a UTF-8 text file (gzip when its name ends in `.gz`), blank ones included.

    Only a line feed ends a line: U+2028, NEL, VT and FF stay inside it, so parallel files stay
    parallel. One carriage return before the line feed and a byte order mark at the start of the
    file are removed. Raises `DataError` for a file that is absent, empty, a directory, not
    readable, a damaged gzip file, or (with the line) not UTF-8.
    """
    empty = True
    for line in _decoded_lines(_with_home(path)):
        empty = False
        yield _without_end(line)
    if empty:
        raise DataError(f"{path}: the file is empty; at least one line is needed")


def raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file with their line feeds, without a byte order mark; `.gz` is decompressed.

    Raises `DataError` for a file that cannot be read or changes meanwhile, and for a damaged gzip
    file.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            before = os.fstat(file.fileno())
            first = next(file, b"").removeprefix(b"\xef\xbb\xbf")
            yield from chain([first] if first else [], file)
            after = os.fstat(file.fileno())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot read the file: {reason}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(
            f"{path}: the file has changed while it was read, from {before.st_size:,} to "
            f"{after.st_size:,} bytes: wait until it is written, and start again"
        )


def read_pairs(
    source_path: str | os.PathLike[str], target_path: str | os.PathLike[str]
) -> tuple[list[str], list[str]]:
    """The lines of two files; line i of one translates line i of the other.

    Raises `DataError` when the numbers of lines differ, and as `iterate_lines` does.
    """
    source, target = read_lines(source_path), read_lines(target_path)
    if len(source) != len(target):
        raise DataError(
            f"{source_path} has {len(source)} lines and {target_path} has {len(target)}: "
            "line i of one must translate line i of the other"
        )
    return source, target


def iterate_tab_pairs(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """The first two columns of a file of lines `source<TAB>target`; further columns are ignored.

    Raises `DataError` naming the first line with fewer than two columns, and as `iterate_lines`
    does.
    """
    for number, line in enumerate(iterate_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise DataError(
                f"{path}:{number}: needed source<TAB>target, got no tab: {shorten(line)!r}"
            )
        yield columns[0], columns[1]


def read_documents(
    paths: Iterable[str | os.PathLike[str]], *, split: Literal["file", "line", "blank_line"]
) -> Iterator[Iterator[str]]:
    r"""The documents of UTF-8 text files (gzip where a name ends in `.gz`), each in blocks.

    A document is a file, a line, or the lines between blank lines. The separators belong to no
    document, and text of white space only is no document. The blocks of a document, about 128 kB
    each, are its text in pieces. They are cut where byte-level BPE gives the same ids as for the
    whole text: after a single line feed or, if there is none, before a single space. Read all
    blocks of a document before the next document. A byte order mark at the start of a file is
    removed. Raises `DataError` for a file that is absent or not readable, a damaged gzip file, one
    that is not UTF-8 (with the line), and when there is no text.

    >>> _ = Path("two.txt").write_text("One.\n\nTwo,\nthree.\n")
    >>> ["".join(blocks) for blocks in read_documents(["two.txt"], split="blank_line")]
    ['One.', 'Two,\nthree.']
    """
    if split not in _SPLITS:
        raise ConfigError(f"split must be one of {', '.join(_SPLITS)}, got {split!r}")
    return _read_documents(list(map(_with_home, paths)), split)


def _read_documents(paths: list[Path], split: str) -> Iterator[Iterator[str]]:
    empty = True
    for path in paths:
        for pieces in _documents(_decoded_lines(path), split):
            empty = False
            yield _blocks(pieces)
    if empty:
        names = ", ".join(str(path) for path in paths[:3]) + (", .." if len(paths) > 3 else "")
        raise DataError(f"{names or 'no files'}: there is no text; give at least one document")


def _documents(lines: Iterator[str], split: str) -> Iterator[Iterable[str]]:
    """The documents that are not blank, each in pieces; `lines` have their line feeds."""
    if split == "line":
        yield from ([_without_end(line)] for line in lines if line.strip())
    elif split == "blank_line":
        for is_text, group in groupby(lines, key=lambda line: not line.isspace()):
            if is_text:
                yield [_without_end("".join(group))]
    else:
        blank: list[str] = []
        for line in lines:
            blank.append(line)
            if not line.isspace():
                yield chain(blank, lines)
                return


def _blocks(pieces: Iterable[str]) -> Iterator[str]:
    """The text of `pieces`, cut where a tokenizer gives the same ids."""
    held: list[str] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length >= BLOCK_LENGTH:
            text, start = "".join(held), 0
            while len(text) - start >= BLOCK_LENGTH:
                cut = _cut(text, start, start + BLOCK_LENGTH)
                yield text[start:cut]
                start = cut
            held, length = [text[start:]], len(text) - start
    if length:
        yield "".join(held)


def _cut(text: str, start: int, stop: int) -> int:
    for mark, after in (("\n", 1), (" ", 0)):
        index = text.rfind(mark, start + 1, stop - 1)
        while index > start:
            if not text[index - 1].isspace() and not text[index + 1].isspace():
                return index + after
            index = text.rfind(mark, start + 1, index)
    return stop


def _with_home(path: str | os.PathLike[str]) -> Path:
    """`path` with the home folder for a first "~", which a shell leaves in quotes."""
    return Path(os.path.expanduser(path))


def _decoded_lines(path: Path) -> Iterator[str]:
    """The lines of a file with their line feeds; `DataError` where it is not UTF-8."""
    for number, line in enumerate(raw_lines(path), start=1):
        if number == 1 and (found := other_format(line)):
            advice = ", or end its name in .gz" if "gzip" in found else ""
            raise DataError(
                f"{path}: the file is {found}, but text is needed: convert it to UTF-8 text{advice}"
            )
        if len(line) >= _LEAST_UTF_16 and 3 * line.count(0) >= len(line):
            raise DataError(
                f"{path}:{number}: a third of the line's bytes are 0, as in UTF-16: convert the "
                "file to UTF-8"
            )
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}:{number}: byte {error.start + 1} of the line (0x{line[error.start]:02x}) "
                f"is not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error


def _without_end(line: str) -> str:
    return line.removesuffix("\n").removesuffix("\r")
