"""Lines of text files, such that line i of one file stays beside line i of another."""

import gzip
import os
import zlib
from pathlib import Path

from jaxformer.tokenizers import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """The lines of a UTF-8 text file (gzip when its name ends in `.gz`), blank ones included.

    Only a line feed ends a line: U+2028, NEL, VT and FF stay inside it, so parallel files stay
    parallel. One carriage return before the line feed and a byte order mark at the start of the
    file are taken off. Raises `DataError` for a file that is absent, empty, a directory, not
    readable, a damaged gzip file, or (with the line) not UTF-8.
    """
    content = _read_bytes(Path(path))
    content = content.removeprefix(_BYTE_ORDER_MARK)
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
            raise DataError(f"{path}:{number}: needed source<TAB>target, got no tab: {line[:60]!r}")
        source.append(columns[0])
        target.append(columns[1])
    return source, target


def _read_bytes(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot read the file: {reason}") from error
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file: {error}") from error
