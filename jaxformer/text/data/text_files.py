"""Text files: their bytes in blocks, their lines, and documents of any size, block by block."""

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from jaxformer.errors import ConfigError, DataError, shorten

BLOCK_BYTES = 1 << 17  # blocks of 1 MB take the tokenizer 400 MB, these 70 MB, at the same speed

_BLANK_LINES = re.compile(r"\r?\n(?:[^\S\n]*\n)+")
_FIRST_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)*")

Part = tuple[str, bool]
"""Text, and whether a document ends with it."""


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
    r"""The lines of `iterate_lines` in a list."""
    return list(iterate_lines(path))


def iterate_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    r"""The lines of a UTF-8 text file (gzip when its name ends in `.gz`), blank ones included.

    Only a line feed ends a line: U+2028, NEL, VT and FF stay inside it, so parallel files stay
    parallel. One carriage return before the line feed and a byte order mark at the start of the
    file are removed. Raises `DataError` for a file that is absent, empty, a directory, not
    readable, a damaged gzip file, or (with the line) not UTF-8.
    """
    last, empty = "", True
    for text in _decode(Path(path), read_blocks(path)):
        *lines, last = (last + text).split("\n")
        empty = empty and not text
        yield from (line.removesuffix("\r") for line in lines)
    if empty:
        raise DataError(f"{path}: the file is empty; at least one line is needed")
    if last:
        yield last.removesuffix("\r")


def read_pairs(
    source_path: str | os.PathLike[str], target_path: str | os.PathLike[str]
) -> tuple[list[str], list[str]]:
    r"""The lines of two files; line i of one translates line i of the other.

    Raises `DataError` when the numbers of lines differ, and as `iterate_lines` does.
    """
    source, target = read_lines(source_path), read_lines(target_path)
    if len(source) != len(target):
        raise DataError(
            f"{source_path} has {len(source)} lines and {target_path} has {len(target)}: "
            "line i of one must translate line i of the other"
        )
    return source, target


def read_tab_pairs(path: str | os.PathLike[str]) -> tuple[list[str], list[str]]:
    r"""The first two columns of a file of lines `source<TAB>target`; further columns are ignored.

    Raises `DataError` naming the first line with fewer than two columns, and as `iterate_lines`
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


def read_documents(
    paths: Iterable[str | os.PathLike[str]], *, split: Literal["file", "line", "blank_line"]
) -> Iterator[Iterator[str]]:
    r"""The documents of UTF-8 text files (gzip where a name ends in `.gz`), each in blocks.

    A document is a file, a line, or the lines between blank lines. The separators belong to no
    document, and text of white space only is no document. The blocks of a document, about 128 kB
    each, are its text in pieces. They are cut where byte-level BPE gives the same ids as for the
    whole text: after a single line feed or, if there is none, before a single space. Read all
    blocks of a document before the next document. A byte order mark at the start of a file is
    removed. Raises `DataError` for a file that is absent or not readable, a damaged gzip file, a
    binary file (NUL bytes), one that is not UTF-8 (both with the line), and when there is no text.

    >>> _ = Path("two.txt").write_text("One.\n\nTwo,\nthree.\n")
    >>> ["".join(blocks) for blocks in read_documents(["two.txt"], split="blank_line")]
    ['One.', 'Two,\nthree.']
    """
    if split not in _SPLITS:
        raise ConfigError(f"split must be one of {', '.join(_SPLITS)}, got {split!r}")
    return _read_documents(list(map(Path, paths)), _SPLITS[split])


def _read_documents(
    paths: list[Path], split: Callable[[Iterator[str]], Iterator[Part]]
) -> Iterator[Iterator[str]]:
    empty = True
    for path in paths:
        for document in _documents(split(_decode(path, _blocks_of_text(path)))):
            empty = False
            yield document
    if empty:
        names = ", ".join(str(path) for path in paths[:3]) + (", .." if len(paths) > 3 else "")
        raise DataError(f"{names or 'no files'}: there is no text; give at least one document")


def _blocks_of_text(path: Path) -> Iterator[bytes]:
    """The blocks of a file; `DataError` for a NUL byte."""
    lines = 1
    for block in read_blocks(path):
        if b"\0" in block:
            lines += block.count(b"\n", 0, block.index(b"\0"))
            raise DataError(f"{path}:{lines}: a NUL byte; this is a binary file, give a text file")
        lines += block.count(b"\n")
        yield block


def _decode(path: Path, blocks: Iterator[bytes]) -> Iterator[str]:
    """The text of `blocks` without a byte order mark; `DataError` where it is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, last, started = 1, b"", False
    for block in chain(blocks, [b""]):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            before = error.object[: error.start]
            line, column = lines + before.count(b"\n"), 1 + len(_last_line(last + before))
            raise DataError(
                f"{path}:{line}: byte {column} of the line (0x{error.object[error.start]:02x}) is "
                f"not UTF-8 ({error.reason}); convert the file to UTF-8"
            ) from error
        lines += block.count(b"\n")
        # The decoder keeps the bytes of half a character for its next call.
        last = _last_line(last + block[: len(block) - len(decoder.getstate()[0])])
        yield text if started else text.removeprefix("\ufeff")
        started = started or bool(text)


def _last_line(content: bytes) -> bytes:
    return content[content.rfind(b"\n") + 1 :]


def _split_files(texts: Iterator[str]) -> Iterator[Part]:
    for text in texts:
        yield text, False
    yield "", True


def _split_lines(texts: Iterator[str]) -> Iterator[Part]:
    held = ""
    for text in texts:
        *lines, last = (held + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r"), True
        held = "\r" if last.endswith("\r") else ""  # a line feed may follow it
        yield last.removesuffix("\r"), False
    yield "", True


def _split_at_blank_lines(texts: Iterator[str]) -> Iterator[Part]:
    # White space at the end of a block is kept for the next one, so that no separator is cut.
    waiting, started = "", False
    for text in texts:
        held = waiting + text
        body = held.rstrip()
        waiting = held[len(body) :]
        if not body:
            continue
        if not started:
            body = _FIRST_BLANK_LINES.sub("", body, count=1)
        *documents, last = _BLANK_LINES.split(body)
        for document in documents:
            yield document, True
        yield last, False
        started = True
    yield waiting.split("\n")[0].removesuffix("\r"), True


_SPLITS: dict[str, Callable[[Iterator[str]], Iterator[Part]]] = {
    "file": _split_files,
    "line": _split_lines,
    "blank_line": _split_at_blank_lines,
}


def _documents(parts: Iterator[Part]) -> Iterator[Iterator[str]]:
    """The documents that are not blank, each as an iterator of its blocks."""
    for text, ends in parts:
        while not ends and not text.strip():
            more, ends = next(parts)
            text += more
        if text.strip():
            document = _until_end(text, ends, parts)
            yield _blocks(document)
            for _ in document:  # blocks that the caller did not take
                pass


def _until_end(text: str, ends: bool, parts: Iterator[Part]) -> Iterator[str]:
    yield text
    while not ends:
        text, ends = next(parts)
        yield text


def _blocks(texts: Iterator[str]) -> Iterator[str]:
    """The same text, cut where a tokenizer gives the same ids."""
    held = ""
    for text in texts:
        held += text
        if len(held) >= BLOCK_BYTES:
            cut = _cut(held)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _cut(text: str) -> int:
    for mark, after in (("\n", 1), (" ", 0)):
        index = text.rfind(mark, 1, -1)
        while index > 0:
            if not text[index - 1].isspace() and not text[index + 1].isspace():
                return index + after
            index = text.rfind(mark, 1, index)
    return len(text)
