"""Text by a name: files of lines or records, data sets of a hub, test sets, your own functions.

a.txt                           lines or documents (.gz too)
a.tsv                           pairs: source<TAB>target
a.jsonl, a.parquet              records with fields
hf:NAME[:CONFIG][@SPLIT]        a data set of the package `datasets`; NAME may be a folder
sacrebleu:TEST_SET:PAIR         a test set of sacreBLEU, such as wmt14/full:en-de
package.module:name             your own function without arguments
"""

import difflib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.cli import import_by_name, is_import_name
from experiments.harness.runs.records import field_of, is_record_file, read_fields
from experiments.harness.runs.text_cache import TextCache
from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import iterate_lines, read_lines, read_tab_pairs


def is_plain(name: str) -> bool:
    """Whether `name` is that of a file of lines or documents."""
    return not (is_record_file(name) or name.endswith((".tsv", ".tsv.gz")) or not is_file(name))


def is_file(name: str) -> bool:
    """Whether `name` is that of a file."""
    return not (name.startswith(("hf:", "sacrebleu:")) or is_import_name(name))


def read_texts(name: str, field: str) -> Iterator[str]:
    """The texts of `name`: its lines, or what its records have under `field`."""
    if is_plain(name):
        return iterate_lines(name)
    return (text for (text,) in _read(name, (field,)))


def read_both(name: str, fields: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Source and target texts of `name`, which holds pairs; `fields` are their names in a record.

    Raises `ConfigError` for a file of lines, `DataError` for what cannot be read.
    """
    source, target = zip(*iterate_both(name, fields), strict=True)
    return list(source), list(target)


def iterate_both(name: str, fields: tuple[str, str]) -> Iterator[tuple[str, ...]]:
    """The pairs of `read_both`, one after the other."""
    if is_plain(name):
        raise ConfigError(
            f"parallel text needs both files, but source={name!r} and target='' were given: only "
            ".tsv, .jsonl, .parquet, hf:NAME, sacrebleu:NAME and package.module:name hold both"
        )
    if name.endswith((".tsv", ".tsv.gz")):
        return zip(*read_tab_pairs(name), strict=True)
    return iter(_read(name, fields))


def identity(name: str, cache: TextCache) -> str:
    """A text that changes with the content of `name`; your own function is called for it."""
    if is_file(name):
        return cache.name_of(Path(name))
    if name.startswith("hf:"):
        return _hub_data_set(name)._fingerprint
    if name.startswith("sacrebleu:"):
        return name
    digest = hashlib.sha256()
    for item in _called(name):
        digest.update(repr(item).encode() + b"\0")
    return digest.hexdigest()


def _read(name: str, fields: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """The texts under `fields` of each record of `name`."""
    if name.startswith("hf:"):
        records = enumerate(_hub_data_set(name))
        return (tuple(field_of(x, field, f"{name}:{i}") for field in fields) for i, x in records)
    if name.startswith("sacrebleu:"):
        return _test_set(name)
    if is_import_name(name):
        return _called(name)
    return read_fields(name, fields)


def _called(name: str) -> Iterator[tuple[str, ...]]:
    """The texts, or tuples of texts, that the function `name` yields."""
    for item in import_by_name(name, "data")():
        texts = tuple(item) if isinstance(item, tuple | list) else (item,)
        if not all(isinstance(text, str) for text in texts):
            raise DataError(f"{name} must give texts or pairs of texts, got {item!r:.80}")
        yield texts


def _hub_data_set(name: str) -> Any:
    """The data set `hf:NAME[:CONFIG][@SPLIT]`; the split is train by default."""
    library = optional_dependencies.load("datasets")
    path, _, split = name.removeprefix("hf:").partition("@")
    path, _, config = path.partition(":")
    try:
        return library.load_dataset(path, config or None, split=split or "train")
    except Exception as error:  # the library raises many classes
        raise DataError(
            f"{name} could not be loaded: {error}: check the name, the split and the network, or "
            "give a folder that holds the data set, as in hf:FOLDER@SPLIT"
        ) from error


def _test_set(name: str) -> list[tuple[str, ...]]:
    """The pairs of `sacrebleu:TEST_SET:PAIR`, with the first reference."""
    library = optional_dependencies.load("sacrebleu")
    _, test_set, pair = [*name.split(":"), "", ""][:3]
    known = library.get_available_testsets()
    if test_set not in known:
        near = difflib.get_close_matches(test_set, known) or sorted(known)[-5:]
        raise ConfigError(
            f"sacrebleu has no test set {test_set!r}: give one such as {', '.join(near)}"
        )
    if pair not in library.get_langpairs_for_testset(test_set):
        pairs = ", ".join(library.get_langpairs_for_testset(test_set))
        raise ConfigError(f"{name}: the language pair {pair!r} is none of {pairs}")
    utils = optional_dependencies.load("sacrebleu.utils")
    try:
        source = utils.get_source_file(test_set, pair)
        target = utils.get_reference_files(test_set, pair)[0]
    except (Exception, SystemExit) as error:  # it ends the process where the network is absent
        raise DataError(
            f"{name} could not be downloaded: check the network, or put its files into "
            f"{utils.SACREBLEU_DIR}, which the variable SACREBLEU names"
        ) from error
    return list(zip(read_lines(source), read_lines(target), strict=True))
