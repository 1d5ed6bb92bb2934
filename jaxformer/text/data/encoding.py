"""Texts encoded to sequences of ids in a file; a call that was stopped goes on where it ended."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from zipfile import BadZipFile

import numpy as np

from jaxformer.errors import DataError
from jaxformer.storage import replacing
from jaxformer.text.data.groups import in_groups
from jaxformer.text.data.text_files import BLOCK_LENGTH
from jaxformer.text.data.token_files import write_parts
from jaxformer.text.data.tokens import Tokens
from jaxformer.text.tokenizers import Tokenizer, check_list

_TEXTS_AT_ONCE = 10_000
_CHARACTERS_AT_ONCE = max(8, 2 * (os.cpu_count() or 1)) * BLOCK_LENGTH  # blocks for each core
_PART = 1 << 23
"""Characters of text whose ids are kept as soon as they are known, for another start."""

Progress = Callable[[int], None]
"""Called with the number of bytes of text that are encoded."""

Block = tuple[str, bool]
"""A part of a text, and whether the text ends with it."""


class TextEncoder(Protocol):
    """An encoder of texts to ids, such as a `Tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    def encode_batch(self, lines: list[str], /) -> list[list[int]]:
        """The ids of each text."""
        ...


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
        start = True
        done = 0
        for group in in_groups(texts, _count_characters, _is_part):
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

    tokens = write_parts(path, parts(), vocab_size=tokenizer.vocab_size)
    shutil.rmtree(kept, ignore_errors=True)
    return tokens


def _encode_group(
    texts: list[str], tokenizer: TextEncoder, kept: Path
) -> tuple[np.ndarray, np.ndarray, int]:
    """The ids of all texts, the number of each text's, and the bytes of the texts.

    They are kept in `kept` where the texts are a whole part.
    """
    digest = hashlib.sha256()
    size = 0
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
    for batch in in_groups(texts, len, _is_batch):
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


def _count_characters(block: Block) -> int:
    return len(block[0])


def _is_part(blocks: list[Block], characters: int) -> bool:
    """Whether the ids of `blocks` are kept together."""
    return characters >= _PART


def _is_batch(texts: list[str], characters: int) -> bool:
    """Whether the tokenizer encodes `texts` at once."""
    return len(texts) == _TEXTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE
