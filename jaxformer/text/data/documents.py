"""Text files of any size to documents, and documents to ids, block by block."""

import codecs
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data.reading import BLOCK_BYTES, read_blocks
from jaxformer.text.data.tokens import Tokens, write_parts
from jaxformer.text.tokenizers import Tokenizer

_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 10_000, 1 << 20
_BLANK_LINES = re.compile(r"\r?\n(?:[^\S\n]*\n)+")
_FIRST_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)*")

Part = tuple[str, bool]
"""Text, and whether a document ends with it."""


def read_documents(
    paths: Iterable[str | os.PathLike[str]], *, split: Literal["file", "line", "blank_line"]
) -> Iterator[Iterator[str]]:
    """The documents of UTF-8 text files (gzip where a name ends in `.gz`), each in blocks.

    A document is a file, a line, or the lines between blank lines. The separators belong to no
    document, and text of white space only is no document. The blocks of a document, about 128 kB
    each, are its text in pieces. They are cut where byte-level BPE gives the same ids as for the
    whole text: after a single line feed or, if there is none, before a single space. Take all
    blocks of a document before the next document. A byte order mark at the start of a file is
    removed. Raises `DataError` for a file that is absent or not readable, a damaged gzip file, a
    binary file (NUL bytes), one that is not UTF-8 (both with the line), and when there is no text.
    """
    if split not in _SPLITS:
        raise ConfigError(f"split must be one of {', '.join(_SPLITS)}, got {split!r}")
    return _read_documents(list(map(Path, paths)), _SPLITS[split])


def encode_documents(
    documents: Iterable[Iterable[str]],
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    *,
    isolate_documents: bool,
) -> Tokens:
    """Writes the ids of each document to the file `path` as one sequence, and opens it.

    With `isolate_documents` bos and eos are put around the ids, where the vocabulary has them. A
    document is a text or an iterable of blocks of text. Each block is encoded separately, so use a
    tokenizer that adds no space before a text. Only a few blocks are in memory at a time.
    """
    special = tokenizer.special
    bos, eos = (special.bos, special.eos) if isolate_documents else (None, None)
    before, after = ([] if id is None else [id] for id in (bos, eos))

    def parts() -> Iterator[tuple[list[int], bool]]:
        start = True
        for batch in _batches(_parts(documents)):
            encoded = tokenizer.encode_batch([text for text, _ in batch])
            for ids, (_, ends) in zip(encoded, batch, strict=True):
                yield (before if start else []) + ids + (after if ends else []), ends
                start = ends

    return write_parts(path, parts(), vocab_size=tokenizer.vocab_size)


def _read_documents(
    paths: list[Path], split: Callable[[Iterator[str]], Iterator[Part]]
) -> Iterator[Iterator[str]]:
    found = False
    for path in paths:
        for document in _documents(split(_read_text(path))):
            found = True
            yield document
    if not found:
        names = ", ".join(str(path) for path in paths[:3]) + (", .." if len(paths) > 3 else "")
        raise DataError(f"{names or 'no files'}: there is no text; give at least one document")


def _read_text(path: Path) -> Iterator[str]:
    """The characters of a file in blocks, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, begun = 0, False
    for chunk in chain(read_blocks(path), [b""]):
        if b"\0" in chunk:
            line = lines + 1 + chunk.count(b"\n", 0, chunk.index(b"\0"))
            raise DataError(f"{path}:{line}: a NUL byte; this is a binary file, give a text file")
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            line = lines + 1 + error.object.count(b"\n", 0, error.start)
            raise DataError(
                f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8 "
                f"({error.reason}); convert the file to UTF-8"
            ) from error
        lines += chunk.count(b"\n")
        yield text if begun else text.removeprefix("\ufeff")
        begun = begun or bool(text)


def _split_files(texts: Iterator[str]) -> Iterator[Part]:
    for text in texts:
        yield text, False
    yield "", True


def _split_lines(texts: Iterator[str]) -> Iterator[Part]:
    rest = ""
    for text in texts:
        *lines, last = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r"), True
        rest = "\r" if last.endswith("\r") else ""  # a line feed may follow it
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
            cut = _place_to_cut(held)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _place_to_cut(text: str) -> int:
    for mark, after in (("\n", 1), (" ", 0)):
        place = text.rfind(mark, 1, -1)
        while place > 0:
            if not text[place - 1].isspace() and not text[place + 1].isspace():
                return place + after
            place = text.rfind(mark, 1, place)
    return len(text)


def _parts(documents: Iterable[Iterable[str]]) -> Iterator[Part]:
    for document in documents:
        blocks = iter([document] if isinstance(document, str) else document)
        block = next(blocks, "")
        for following in blocks:
            yield block, False
            block = following
        yield block, True


def _batches(parts: Iterator[Part]) -> Iterator[list[Part]]:
    batch, characters = [], 0
    for part in parts:
        batch.append(part)
        characters += len(part[0])
        if len(batch) == _TEXTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
