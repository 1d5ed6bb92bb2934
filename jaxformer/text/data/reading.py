"""Text files: their bytes in blocks, and their lines, so that parallel files stay parallel."""

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from jaxformer.errors import DataError, shorten

BLOCK_BYTES = 1 << 17  # blocks of 1 MB take the tokenizer 400 MB, these 70 MB, at the same speed

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_blocks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The bytes of a file in blocks, decompressed when its name ends in `.gz`.

    Raises `DataError` for a file that cannot be read and for a damaged gzip file.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                yield block
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot read the file: {reason}") from error


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a UTF-8 text file (gzip when its name ends in `.gz`), blank ones included.

    Only a line feed ends a line: U+2028, NEL, VT and FF stay inside it, so parallel files stay
    parallel. One carriage return before the line feed and a byte order mark at the start of the
    file are removed. Raises `DataError` for a file that is absent, empty, a directory, not
    readable, a damaged gzip file, or (with the line) not UTF-8.
    """
    content = b"".join(read_blocks(path)).removeprefix(_BYTE_ORDER_MARK)
    if not content:
        raise DataError(f"{path}: the file is empty; at least one line is needed")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)
        raise DataError(
            f"{path}:{line}: byte {column} of the line (0x{content[error.start]:02x}) is not "
            f"UTF-8 ({error.reason}); convert the file to UTF-8"
        ) from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_pairs(
    source_path: str | os.PathLike[str], target_path: str | os.PathLike[str]
) -> tuple[list[str], list[str]]:
    """The lines of two files of which line i of one translates line i of the other.

    Raises `DataError` when the numbers of lines differ, and as `read_lines` does.
    """
    source, target = read_lines(source_path), read_lines(target_path)
    if len(source) != len(target):
        raise DataError(
            f"{source_path} has {len(source)} lines and {target_path} has {len(target)}: "
            "line i of one must translate line i of the other"
        )
    return source, target


def read_tab_pairs(path: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    """The first two columns of a file of lines `source<TAB>target`; further columns are ignored.

    Raises `DataError` naming the first line with fewer than two columns, and as `read_lines`
    does.
    """
    source, target = [], []
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) < 2:
            raise DataError(
                f"{path}:{number}: needed source<TAB>target, got no tab: {shorten(line)!r}"
            )
        source.append(columns[0])
        target.append(columns[1])
    return source, target
