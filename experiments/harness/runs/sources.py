"""Text by a name: files of lines or records, data sets, your own functions.

a.txt                           lines or documents (.gz too)
a.tsv                           pairs: source<TAB>target; a first line of these words is no pair
a.bin, a.npy                    ids that others made (`jaxformer.text.data.id_files`); a pattern of
                                such names too
a.jsonl, a.parquet              records with fields; .ndjson, .json (one a line), .gz too
hf:NAME[:CONFIG][@SPLIT]        a data set of the package `datasets`; NAME may be a folder of files,
                                or one that `save_to_disk` has written
package.module:name             your own function without arguments

A .csv file, an archive and a document of an office are refused.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from experiments.harness.runs.data_sets import data_set_identity, load_data_set
from experiments.harness.runs.own_texts import read_called
from experiments.harness.runs.records import read_fields, text_of
from experiments.harness.runs.source_kinds import kind_of
from experiments.harness.runs.text_cache import TextCache
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import iterate_lines, iterate_tab_pairs

_HEADERS = ("source", "target"), ("src", "tgt"), ("src", "trg")
"""The first lines of tables of pairs that name their columns."""


def read_texts(name: str, field: str) -> Iterator[str]:
    """The texts of `name`: its lines, or what its records have under `field`."""
    if kind_of(name) == "text":
        return iterate_lines(name)
    if kind_of(name) == "table":
        raise ConfigError(
            f"{name} holds pairs of texts, but single texts are needed: give a file of lines, "
            ".jsonl, .parquet, hf:NAME or package.module:name"
        )
    if kind_of(name) == "ids":
        raise ConfigError(f"{name} holds ids, but text is needed: give the text they are made from")
    return (text for (text,) in _read(name, (field,)))


def iterate_both(name: str, fields: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Source and target texts of `name`, which holds pairs; `fields` are their names in a record.

    Raises `ConfigError` for a file of lines or ids, `DataError` for what cannot be read, and where
    there is no pair.
    """
    is_empty = True
    for source, target in _read_both(name, fields):
        is_empty = False
        yield source, target
    if is_empty:
        raise DataError(f"{name} gave no pair of texts: give at least one")


def _read_both(name: str, fields: tuple[str, str]) -> Iterable[tuple[str, ...]]:
    if kind_of(name) == "text":
        raise ConfigError(
            f"parallel text needs both files, but source={name!r} and target='' were given: only "
            ".tsv, .jsonl, .parquet, hf:NAME and package.module:name hold both"
        )
    if kind_of(name) == "ids":
        raise ConfigError(
            f"{name} holds ids, but pairs of texts are needed: only language modelling reads ids"
        )
    if kind_of(name) == "table":
        return _without_header(iterate_tab_pairs(name))
    return _read(name, fields)


def _without_header(pairs: Iterator[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """`pairs` without a first one that names the two sides."""
    for number, pair in enumerate(pairs):
        if number > 0 or tuple(side.strip().lower() for side in pair) not in _HEADERS:
            yield pair


def identity(name: str, cache: TextCache) -> str:
    """A text that changes with the content of `name`, and with how it is read.

    Your own function is called for it. Raises `DataError` for a file that is not there, and for one
    that can be read only once.
    """
    kind, path = kind_of(name), Path(os.path.expanduser(name))
    if kind == "data set":
        return data_set_identity(name, cache)
    if kind == "function":
        digest = hashlib.sha256()
        for item in read_called(name):
            digest.update(repr(item).encode() + b"\0")
        return digest.hexdigest()
    if not path.exists():
        raise DataError(f"{name}: cannot read the file: No such file or directory")
    if not path.is_file():
        raise DataError(
            f"{name} is no regular file, and a text is read several times: write it to a file, "
            "and give that"
        )
    return f"{kind} {cache.digest(path)}"


def _read(name: str, fields: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """The texts under `fields` of each record of `name`."""
    kind = kind_of(name)
    if kind == "data set":
        records = enumerate(load_data_set(name))
        return (tuple(text_of(x, field, f"{name}:{i}") for field in fields) for i, x in records)
    return read_called(name, len(fields)) if kind == "function" else read_fields(name, fields)
