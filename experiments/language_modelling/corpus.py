"""The text of an experiment: documents for training, validation and test."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.harness.runs import downloads, own_texts, source_kinds, sources
from experiments.harness.runs.shares import shares_of
from experiments.harness.runs.text_cache import NOTHING_KEPT, TextCache
from experiments.language_modelling import stdlib
from experiments.language_modelling.id_text import IdPart, cut_off, id_part, is_ids
from experiments.language_modelling.presets import DataConfig
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import read_documents
from jaxformer.text.metrics import TextSize, count_text

_SHARE_SET_ASIDE = 20
"""One in this many characters, or ids, is set aside for validation..."""
_MOST_SET_ASIDE = 1_000_000
"""...and at most this many of them."""


class Part(NamedTuple):
    """The characters `start` to `stop` of documents, counted over all `paths`.

    A path may also be another source's name (`experiments.harness.runs.sources`), of whose records
    `field` is a document.
    """

    paths: tuple[str | Path, ...]
    split: Literal["file", "line", "blank_line"] = "file"
    start: int = 0
    stop: int | None = None
    field: str = "text"

    def documents(self) -> Iterator[Iterator[str]]:
        """Each document as blocks of text, read one after the other.

        Raises `DataError` as `read_documents` does.
        """
        documents = self._whole()
        if self.start == 0 and self.stop is None:
            return documents
        return _between(documents, self.start, self.stop)

    def _whole(self) -> Iterator[Iterator[str]]:
        plain = [source_kinds.kind_of(path) == "text" for path in self.paths]
        if all(plain):
            return read_documents(self.paths, split=self.split)
        parts = (
            read_documents((path,), split=self.split)
            if is_plain
            else (iter([text]) for text in sources.read_texts(str(path), self.field) if text)
            for path, is_plain in zip(self.paths, plain, strict=True)
        )
        return chain.from_iterable(parts)


class Corpus(NamedTuple):
    """The three parts of a corpus, as text or as ids; `test` may be None."""

    train: Part | IdPart
    validation: Part | IdPart
    test: Part | IdPart | None


def load_mixture(config: DataConfig, cache: TextCache = NOTHING_KEPT) -> dict[str, Corpus]:
    """The text that `config` names, as `load_corpus` does, or each of those with shares, by name.

    Only the first has a test part, which is of all. One text has the name "".
    """
    shares = shares_of(config.train)
    if not shares:
        return {"": load_corpus(config, cache)}
    validation: list[tuple[str, ...]] = [(name,) for name in config.validation]
    if validation and len(validation) != len(shares):
        raise ConfigError(
            f"{len(shares)} training texts have shares, but there are {len(validation)} "
            "--data.validation files: give one for each, in their order, or none"
        )
    if config.document_id is not None and not any(is_ids((name,)) for name in shares):
        raise ConfigError(_no_ids(config.document_id))
    texts: dict[str, Corpus] = {}
    for name, held_out in zip(shares, validation or [()] * len(shares), strict=True):
        data = replace(config, train=(name,), validation=held_out)
        if not is_ids((name,)):
            data = replace(data, document_id=None, validation_tokens=0)
        texts[name] = load_corpus(replace(data, test=() if texts else config.test), cache)
    return texts


class TextMetadata(NamedTuple):
    """SHA-256 (hex) of a part's documents, their number, words and bytes."""

    text: str
    documents: int
    amount: TextSize


def load_corpus(config: DataConfig, cache: TextCache = NOTHING_KEPT) -> Corpus:
    """The text that `config` names. Raises `DataError` for what cannot be read or found.

    Files given for training replace the whole built-in corpus; without validation files, their
    last twentieth, at most 1,000,000 characters, is set aside.
    """
    if config.train:
        corpus = _from_files(config, cache)
    elif config.corpus in _BUILT_IN:
        corpus = _BUILT_IN[config.corpus](config)
    else:
        raise ConfigError(
            f"corpus={config.corpus!r} comes from files: give --data.train FILE .., or one of the "
            f"corpora {', '.join(_BUILT_IN)}"
        )
    validation = part_of(config.validation, config, cache) or corpus.validation
    test = part_of(config.test, config, cache) or corpus.test
    corpus = corpus._replace(validation=_beginning(validation, config), test=test)
    if config.document_id is not None and not any(isinstance(x, IdPart) for x in corpus):
        raise ConfigError(_no_ids(config.document_id))
    return corpus


def _no_ids(document_id: int) -> str:
    return (
        f"document_id={document_id} is for text that comes as ids, in .bin and .npy: leave it out"
    )


def part_of(
    files: tuple[str, ...], config: DataConfig, cache: TextCache = NOTHING_KEPT
) -> Part | IdPart | None:
    """The documents of `files`, cut as `config` says, or None where none are given.

    Your own functions among them are called here, and not again. Raises `ConfigError` for a file
    that is given twice: a part that is set aside from the end would be trained on, too.
    """
    if not files:
        return None
    names: dict[str, str] = {}
    for name in files:
        path = os.path.realpath(os.path.expanduser(name))
        if path in names:
            raise ConfigError(
                f"{names[path]} is given twice: give each text once, or a share, as {names[path]}=2"
            )
        names[path] = name
    if is_ids(files):
        return id_part(files, config.document_id, isolate=config.isolate_documents)
    paths = tuple(own_texts.called_once(name, (config.text_field,), cache) for name in files)
    return Part(paths, config.split, field=config.text_field)


def _beginning(part: Part | IdPart, config: DataConfig) -> Part | IdPart:
    """The tokens of the validation text that are measured."""
    most = config.validation_tokens
    if most == 0:
        return part
    if isinstance(part, Part):
        raise ConfigError(
            f"validation_tokens={most} is for text that comes as ids, in .bin and .npy: leave it "
            "out, and give fewer --data.validation files"
        )
    stop = part.start + most
    return part._replace(stop=stop if part.stop is None else min(stop, part.stop))


def identity(part: Part, cache: TextCache) -> list:
    """JSON of all that decides the documents of `part`."""
    return [[sources.identity(str(path), cache) for path in part.paths], *part[1:]]


def metadata_of(part: Part, cache: TextCache = NOTHING_KEPT) -> TextMetadata:
    """The metadata of `part`, which is read once."""
    record = cache.record(["metadata", identity(part, cache)], lambda: _read_metadata(part))
    return TextMetadata(record["text"], record["documents"], TextSize(*record["amount"]))


def _read_metadata(part: Part) -> dict[str, Any]:
    digest = hashlib.sha256()
    documents, words, size = 0, 0, 0
    for document in part.documents():
        amount = count_text(_digested(document, digest))
        digest.update(b"\0")  # the end of a document; no text has this byte
        documents, words, size = documents + 1, words + amount.words, size + amount.bytes
    return TextMetadata(digest.hexdigest(), documents, TextSize(words, size))._asdict()


def _from_files(config: DataConfig, cache: TextCache) -> Corpus:
    whole = part_of(config.train, config, cache)
    assert whole is not None  # `config.train` names files
    if config.validation:
        return Corpus(whole, whole, None)
    if isinstance(whole, IdPart):
        train, aside = cut_off(whole, _SHARE_SET_ASIDE, _MOST_SET_ASIDE)
        return Corpus(train, aside, None)
    characters = ["characters", identity(whole, cache)]
    total = cache.record(characters, lambda: {"total": _characters(whole)})["total"]
    aside = min(total // _SHARE_SET_ASIDE, _MOST_SET_ASIDE)
    if aside == 0:
        raise DataError(
            f"{config.train[0]}: {total} characters are too few to set some aside for validation: "
            "give --data.validation FILE"
        )
    return _cut(whole, total - aside)


def _characters(part: Part) -> int:
    return sum(len(block) for document in part.documents() for block in document)


def _python_stdlib(config: DataConfig) -> Corpus:
    parts = (stdlib.files(part) for part in ("train", "validation", "test"))
    return Corpus(*(Part(tuple(paths), config.split) for paths in parts))


def _shakespeare(config: DataConfig) -> Corpus:
    path = downloads.find("tinyshakespeare", "input.txt")
    return _cut(Part((path,), config.split), 1_003_854)  # nine tenths of its characters


def _wikitext2(config: DataConfig) -> Corpus:
    parts = (downloads.find("wikitext-2", f"{part}.txt.gz") for part in ("train", "valid", "test"))
    return Corpus(*(Part((path,), config.split) for path in parts))


_BUILT_IN = {
    "python_stdlib": _python_stdlib,
    "shakespeare": _shakespeare,
    "wikitext2": _wikitext2,
}


def _cut(part: Part, character: int) -> Corpus:
    """`part` cut in two before `character`, without a test."""
    return Corpus(part._replace(stop=character), part._replace(start=character), None)


def _between(
    documents: Iterator[Iterator[str]], start: int, stop: int | None
) -> Iterator[Iterator[str]]:
    """Characters `start` to `stop` of `documents`, counted over all of them."""
    read = 0  # characters

    def cut(blocks: Iterator[str]) -> Iterator[str]:
        nonlocal read
        for block in blocks:
            first = max(start - read, 0)
            last = None if stop is None else max(stop - read, 0)
            read += len(block)
            if block[first:last]:
                yield block[first:last]

    for document in documents:
        blocks = cut(document)
        first = next(blocks, None)
        if first is not None:
            yield chain([first], blocks)
        for _ in blocks:  # blocks that the caller did not read count too
            pass
        if stop is not None and read >= stop:
            return


def _digested(blocks: Iterator[str], digest: "hashlib._Hash") -> Iterator[str]:
    for block in blocks:
        digest.update(block.encode())
        yield block
