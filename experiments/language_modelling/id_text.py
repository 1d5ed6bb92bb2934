"""Text that comes as ids: files of nanoGPT, llm.c and numpy, of which nothing is copied."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.harness.runs import source_kinds
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import JoinedIds, Tokens, expand
from jaxformer.text.metrics import TextSize, count_text
from jaxformer.text.tokenizers import Tokenizer

_PIECE = 1 << 17
"""Ids that are decoded at once."""
_LONGEST_CHARACTER = 8
"""Ids among which a character ends, so that ids may be decoded in two pieces."""


class IdPart(NamedTuple):
    """The ids `start` to `stop` of files, counted over all of them.

    `document_id` separates documents; None: all is one document.
    """

    paths: tuple[str, ...]
    document_id: int | None = None
    start: int = 0
    stop: int | None = None

    def open(self, vocab_size: int | None = None) -> Tokens:
        """The ids, memory-mapped; one outside `vocab_size` is found when it is read."""
        tokens = Tokens.open(self.paths, document_id=self.document_id, vocab_size=vocab_size)
        stop = len(tokens.ids) if self.stop is None else self.stop
        if (self.start, stop) == (0, len(tokens.ids)):
            return tokens
        return tokens.between(self.start, stop)


def is_ids(names: tuple[str, ...]) -> bool:
    """Whether `names` are files of ids; `ConfigError` where only part of them are."""
    kinds = [source_kinds.kind_of(name) == "ids" for name in names]
    if any(kinds) and not all(kinds):
        ids, text = names[kinds.index(True)], names[kinds.index(False)]
        raise ConfigError(
            f"{ids} holds ids and {text} holds text: one text comes as the one or the other; to "
            f"train on both, give each a share, as in {ids}=0.5 {text}=0.5"
        )
    return any(kinds)


def id_part(names: tuple[str, ...], document_id: int | None, *, isolate: bool) -> IdPart:
    """The ids of the files `names`, which may be patterns.

    Raises `ConfigError` where documents are to be kept apart, but nothing separates them.
    """
    if isolate and document_id is None:
        raise ConfigError(
            f"{names[0]} holds ids without an index of documents: give --data.document_id (of "
            "evaluate --document_id), the id between two documents (50256 in GPT-2's ids), or "
            "train with --data.no_isolate_documents"
        )
    paths = (path for name in names for path in expand(name))
    return IdPart(tuple(str(path.absolute()) for path in paths), document_id)


def cut_off(part: IdPart, share: int, most: int) -> tuple[IdPart, IdPart]:
    """`part` without its end, and the end: one of `share` ids, and not more than `most`."""
    total = len(part.open().ids)
    aside = min(total // share, most)
    if aside < 2:
        raise DataError(
            f"{part.paths[0]}: {total} ids are too few to set some aside for validation: give "
            "--data.validation FILE"
        )
    return part._replace(stop=total - aside), part._replace(start=total - aside, stop=total)


def amount_of(tokens: Tokens, tokenizer: Tokenizer) -> tuple[int, TextSize]:
    """The number of documents of `tokens`, and how much text they are; all is decoded for it."""
    documents, words, size = 0, 0, 0
    for document in _documents(tokens, tokenizer):
        amount = count_text(document)
        documents, words, size = documents + 1, words + amount.words, size + amount.bytes
    return documents, TextSize(words, size)


def _documents(tokens: Tokens, tokenizer: Tokenizer) -> Iterator[Iterator[str]]:
    """The text of each document in pieces."""
    total, separator = len(tokens.ids), tokens.document_id
    begin = 0
    while begin < total:
        end = total if separator is None else _next(tokens, separator, begin)
        if end > begin:
            yield _pieces(tokens, tokenizer, begin, end)
        begin = end + 1 if separator is not None else end


def _next(tokens: Tokens, separator: int, begin: int) -> int:
    """The place of the first `separator` from `begin` on, or the end of `tokens`."""
    total = len(tokens.ids)
    size = 1 << 12
    while begin < total:
        found = np.flatnonzero(tokens.ids[begin : min(begin + size, total)] == separator)
        if len(found):
            return begin + int(found[0])
        begin, size = begin + size, _PIECE
    return total


def _pieces(tokens: Tokens, tokenizer: Tokenizer, begin: int, end: int) -> Iterator[str]:
    """The text of the ids `begin` to `end`, cut where a character ends."""
    while begin < end:
        stop = min(begin + _PIECE, end)
        text = _decoded(tokens, tokenizer, begin, stop)
        for more in range(stop + 1, min(stop + _LONGEST_CHARACTER, end) + 1):
            if not text.endswith("\ufffd"):
                break
            text, stop = _decoded(tokens, tokenizer, begin, more), more
        yield text
        begin = stop


def _decoded(tokens: Tokens, tokenizer: Tokenizer, begin: int, stop: int) -> str:
    return tokenizer.decode(tokens.take(np.arange(begin, stop)).tolist())


def describe_documents(tokens: Tokens) -> str:
    """The files of `tokens`, and how often the id comes that separates documents."""
    assert isinstance(tokens.ids, JoinedIds)
    files = f"{len(tokens.ids):,} tokens in {len(tokens.ids.files)} files"
    if tokens.document_id is None:
        return files
    seen = tokens.ids.sample()
    count = int(np.count_nonzero(seen == tokens.document_id))
    if count == 0:
        return (
            f"{files}; the id {tokens.document_id} (--data.document_id) is not among {len(seen):,} "
            "ids that were looked at: is it the one between documents?"
        )
    return f"{files}, about one document in {len(seen) / count:,.0f} tokens"
