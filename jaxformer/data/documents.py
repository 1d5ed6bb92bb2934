"""Text files of any size to documents, and documents to ids, a block at a time."""

import codecs
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from jaxformer.config import ConfigError
from jaxformer.data.tokens import Tokens, write_parts
from jaxformer.tokenizers import DataError, Tokenizer

_BLOCK = 1 << 17  # of 1 MB the tokenizer would need 400 MB, of this 70 MB, at the same speed
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 10_000, 1 << 20
_BLANK_LINES = re.compile(r"\r?\n(?:[^\S\n]*\n)+")
_FIRST_BLANK_LINES = re.compile(r"(?:[^\S\n]*\n)*")

Part = tuple[str, bool]  # text, and whether a document ends with it


def read_documents(
    paths: Iterable[str | os.PathLike[str]], *, split: Literal["file", "line", "blank_line"]
) -> Iterator[Iterator[str]]:
    """The documents of UTF-8 text files (gzip where a name ends in `.gz`), each in blocks.

    A document is a file, a line, or the lines between blank ones; what separates documents
    belongs to none, and text of white space only is no document. The blocks of a document, about
    128 kB each, joined are its text; they end where byte-level BPE gives the same ids as for the
    whole: after a single line feed or, failing that, before a single space, with other characters
    around it. Take the blocks of one document before the next document. A byte order mark at the
    start of a file is taken off. Raises `DataError` for a file that is absent or not readable, a
    damaged gzip file, a binary file (NUL bytes), one that is not UTF-8 (both with the line), and
    when there is no text at all.
    """
    if split not in _SPLITS:
        raise ConfigError(f"split must be one of {', '.join(_SPLITS)}, got {split!r}")
    return _read(list(map(Path, paths)), _SPLITS[split])


def encode_documents(
    documents: Iterable[Iterable[str]],
    tokenizer: Tokenizer,
    path: str | os.PathLike[str],
    *,
    separate: bool,
) -> Tokens:
    """The ids of every document, written to the file `path` as one sequence each.

    With `separate` a sequence is bos, ids, eos, as far as the vocabulary has them, else the bare
    ids. A document is a text or an iterable of blocks of text, each encoded for itself: use a
    tokenizer that puts nothing in front of a text. Only some blocks are in memory at a time.
    """
    bos, eos = (tokenizer.special.bos, tokenizer.special.eos) if separate else (None, None)
    before, after = ([] if id is None else [id] for id in (bos, eos))

    def parts() -> Iterator[tuple[list[int], bool]]:
        start = True
        for batch in _batches(_parts(documents)):
            encoded = tokenizer.encode_batch([text for text, _ in batch])
            for ids, (_, ends) in zip(encoded, batch, strict=True):
                yield (before if start else []) + ids + (after if ends else []), ends
                start = ends

    return write_parts(path, parts(), vocab_size=tokenizer.vocab_size)


def _read(
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
    """The characters of a file, a block at a time, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines, begun = 0, False
    for chunk in chain(_read_bytes(path), [b""]):
        if b"\0" in chunk:
            line = lines + 1 + chunk.count(b"\n", 0, chunk.index(b"\0"))
            raise DataError(f"{path}:{line}: a NUL byte; this is a binary file, give it as text")
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


def _read_bytes(path: Path) -> Iterator[bytes]:
    """The bytes of a file, unpacked."""
    zipped = path.suffix == ".gz"
    try:
        with gzip.open(path) if zipped else open(path, "rb") as file:
            while chunk := file.read(_BLOCK):
                yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot read the file: {reason}") from error


def _whole(texts: Iterator[str]) -> Iterator[Part]:
    for text in texts:
        yield text, False
    yield "", True


def _lines(texts: Iterator[str]) -> Iterator[Part]:
    rest = ""
    for text in texts:
        *lines, last = (rest + text).split("\n")
        for line in lines:
            yield line.removesuffix("\r"), True
        rest = "\r" if last.endswith("\r") else ""  # it may belong to a line feed to come
        yield last.removesuffix("\r"), False
    yield "", True


def _between_blank_lines(texts: Iterator[str]) -> Iterator[Part]:
    # White space at the end of a text waits for what follows, so that no separator is cut.
    waiting, started = "", False
    for text in texts:
        held = waiting + text
        body = held.rstrip()
        waiting = held[len(body) :]
        if not body:
            continue
        if not started:
            body = body[_FIRST_BLANK_LINES.match(body).end() :]
        *documents, last = _BLANK_LINES.split(body)
        for document in documents:
            yield document, True
        yield last, False
        started = True
    yield waiting.split("\n")[0].removesuffix("\r"), True


_SPLITS: dict[str, Callable[[Iterator[str]], Iterator[Part]]] = {
    "file": _whole,
    "line": _lines,
    "blank_line": _between_blank_lines,
}


def _documents(parts: Iterator[Part]) -> Iterator[Iterator[str]]:
    """The documents that are not blank, each of its parts as blocks."""
    for text, ends in parts:
        while not ends and not text.strip():
            more, ends = next(parts)
            text += more
        if text.strip():
            document = _until_end(text, ends, parts)
            yield _blocks(document)
            for _ in document:  # what was not taken
                pass


def _until_end(text: str, ends: bool, parts: Iterator[Part]) -> Iterator[str]:
    yield text
    while not ends:
        text, ends = next(parts)
        yield text


def _blocks(texts: Iterator[str]) -> Iterator[str]:
    """The same text, cut where a tokenizer would not notice."""
    held = ""
    for text in texts:
        held += text
        if len(held) >= _BLOCK:
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
