"""The text of an experiment: training, validation and test pairs."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.cli import display
from experiments.harness.runs import downloads, own_texts, source_kinds, sources
from experiments.harness.runs.compact_lines import CompactLines
from experiments.harness.runs.sample_tables import lines_digest
from experiments.harness.runs.text_cache import NOTHING_KEPT, TextCache
from experiments.translation.grammar import make_corpus
from experiments.translation.presets import DataConfig, Files
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import iterate_tab_pairs, read_pairs

GRAMMAR = Path(__file__).parent / "grammar"
"""The code and the tables of the built-in text `grammar`."""


class Text(NamedTuple):
    """Parallel lines: `target[i]` translates `source[i]`."""

    source: Sequence[str]
    target: Sequence[str]


class Corpus(NamedTuple):
    """The three parts of a corpus; `test` may be empty, and `train` is read when it is called."""

    fingerprint: str
    """Fingerprint of the training text."""
    train: Callable[[], Text]
    validation: Text
    test: Text


Parts = tuple[Text, Text, Text]
_NOTHING = Text([], [])


def open_corpus(config: DataConfig, cache: TextCache = NOTHING_KEPT) -> Corpus:
    """The text that `config` names; `cache` keeps all of it but the training text.

    Files given for training replace the whole built-in corpus; without validation files, about
    one source in fifty, chosen by its hash and at most 1,000, is set aside with its translations.
    Raises `DataError` for a file that cannot be read or found.
    """
    config = _with_calls(config, cache)
    read = functools.cache(lambda: _read(config))

    def train() -> Text:
        text = read()[0]
        if not config.lowercase:
            return text
        return Text(*(CompactLines(map(str.lower, side)) for side in text))

    def outline() -> dict[str, Any]:
        held_out = [[list(side) for side in part] for part in read()[1:]]
        return {"fingerprint": fingerprint(train()), "held_out": held_out}

    names = [sources.identity(str(name), cache) for name in _sources(config)]
    fields = [config.train.source_field, config.train.target_field]
    has_validation = config.validation.source != ""
    made_from = [config.corpus, names, fields, has_validation, config.lowercase]
    record = cache.record(made_from, outline)
    validation, test = (Text(*sides) for sides in record["held_out"])
    validation = read_files(config.validation) or validation
    test = read_files(config.test) or test
    return Corpus(
        record["fingerprint"], train, as_trained(validation, config), as_trained(test, config)
    )


def _with_calls(config: DataConfig, cache: TextCache) -> DataConfig:
    """`config` with a file in place of each function of the user's own, which is called here."""
    return replace(
        config,
        train=_called_once(config.train, cache),
        validation=_called_once(config.validation, cache),
        test=_called_once(config.test, cache),
    )


def _called_once(files: Files, cache: TextCache) -> Files:
    fields = files.source_field, files.target_field
    if not files.source or not files.target:
        if not files.source:
            return files
        return replace(files, source=own_texts.called_once(files.source, fields, cache))
    source = own_texts.called_once(files.source, fields[:1], cache)
    target = own_texts.called_once(files.target, fields[1:], cache)
    return replace(files, source=source, target=target)


def as_trained(text: Text, config: DataConfig) -> Text:
    """`text`, in lower case if `config.lowercase`."""
    return Text(*([line.lower() for line in side] for side in text)) if config.lowercase else text


def fingerprint(text: Text) -> str:
    """SHA-256 (hex) of all lines of both sides."""
    return lines_digest(*text)


def read_files(files: Files) -> Text | None:
    """The text of `iterate_files` in two lists, or None where no files are given."""
    if not files.source and not files.target:
        return None
    return Text(*map(list, _gathered(iterate_files(files))))


def iterate_files(files: Files) -> Iterator[tuple[str, str]]:
    """The pairs of two files, or of one that holds both sides, one after the other.

    Raises `ConfigError` for a target without a source, `DataError` where a side cannot be read, the
    two differ in length, or there is no pair.
    """
    if not files.source:
        raise ConfigError(
            f"parallel text needs both files, but source='' and target={files.target!r} were given"
        )
    if not files.target:
        return sources.iterate_both(files.source, (files.source_field, files.target_field))
    return _in_parallel(files)


def _in_parallel(files: Files) -> Iterator[tuple[str, str]]:
    """The texts of the source file, each with the text of the target file that translates it."""
    source_texts = sources.read_texts(files.source, files.source_field)
    target_texts = sources.read_texts(files.target, files.target_field)
    count = 0
    for source, target in zip_longest(source_texts, target_texts):
        if source is None or target is None:
            longer = count + 1 + sum(1 for _ in chain(source_texts, target_texts))
            source_count, target_count = (count, longer) if source is None else (longer, count)
            kinds = {source_kinds.kind_of(name) for name in (files.source, files.target)}
            item = "line" if kinds == {"text"} else "text"
            raise DataError(
                f"{files.source} has {source_count} {item}s and {files.target} has {target_count}: "
                f"{item} i of one must translate {item} i of the other"
            )
        count += 1
        yield source, target


def _gathered(pairs: Iterable[tuple[str, str]]) -> Text:
    """The `pairs` as a text, without a string for each line."""
    source_lines, target_lines = CompactLines(), CompactLines()
    for source, target in pairs:
        source_lines.append(source)
        target_lines.append(target)
    return Text(source_lines, target_lines)


def _read(config: DataConfig) -> Parts:
    """The text before the user's validation and test files replace its parts."""
    if config.train != Files():
        return _from_files(config)
    if config.corpus in BUILT_IN:
        return BUILT_IN[config.corpus].read()
    raise ConfigError(
        f"corpus={config.corpus!r} comes from files: give --data.train.source FILE and "
        f"--data.train.target FILE, or one of the corpora {', '.join(BUILT_IN)}"
    )


def _sources(config: DataConfig) -> Sequence[str | Path]:
    """The files that decide what `_read` returns."""
    if config.train != Files():
        return [path for path in (config.train.source, config.train.target) if path]
    return BUILT_IN[config.corpus].files() if config.corpus in BUILT_IN else []


def _from_files(config: DataConfig) -> Parts:
    pairs = iterate_files(config.train)
    if config.validation != Files():
        return _gathered(pairs), _NOTHING, _NOTHING
    train, validation = _split(pairs, 0.02, most=1_000)
    if not validation.source:
        raise DataError(
            f"{config.train.source}: {len(train.source)} pairs are too few to set some aside for "
            "validation: give --data.validation.source FILE and --data.validation.target FILE"
        )
    return train, validation, _NOTHING


class BuiltIn(NamedTuple):
    """A corpus that needs no files of the user."""

    read: Callable[[], Parts]
    files: Callable[[], list[Path]]
    """All files that decide its text, code included."""


def _grammar() -> Parts:
    with display.phase("making 60,000 pairs of sentences"):
        pairs = make_corpus(train=60_000, validation=1_000, test=1_000, seed=0)
    train, validation, test = (Text(*map(list, zip(*x, strict=True))) for x in pairs.values())
    return train, validation, test


def _grammar_files() -> list[Path]:
    return sorted(path for path in GRAMMAR.rglob("*.*") if path.suffix in (".py", ".txt"))


def _multi30k() -> Parts:
    paths = _multi30k_files()
    train, validation, test = (Text(*read_pairs(*paths[i : i + 2])) for i in (0, 2, 4))
    return train, validation, test


def _multi30k_files() -> list[Path]:
    parts, sides = ("train", "val", "test_2016_flickr"), ("en", "de")
    return [downloads.find("multi30k", f"{part}.{side}.gz") for part in parts for side in sides]


def _tatoeba() -> Parts:
    # Split by English sentence: no test sentence is in the training text with another translation.
    train, held_out = _split(iterate_tab_pairs(*_tatoeba_files()), 0.02)
    validation, test = _split(zip(*held_out, strict=True), 0.01)
    return train, _first_translations(validation), _first_translations(test)


def _tatoeba_files() -> list[Path]:
    return [downloads.find("tatoeba-deu-eng", "deu.txt.gz")]


BUILT_IN = {
    "grammar": BuiltIn(_grammar, _grammar_files),
    "multi30k": BuiltIn(_multi30k, _multi30k_files),
    "tatoeba": BuiltIn(_tatoeba, _tatoeba_files),
}


def _split(
    pairs: Iterable[tuple[str, str]], share: float, most: int | None = None
) -> tuple[Text, Text]:
    """Training pairs, and pairs set aside: those whose source has a hash (0 to 1) below `share`.

    At most `most` sources are set aside; all pairs of one source stay together.
    """
    kept = CompactLines(), CompactLines()
    set_aside = CompactLines(), CompactLines()
    chosen: set[str] = set()
    for source, target in pairs:
        number = int(hashlib.sha256(source.encode()).hexdigest()[:8], 16) / 2**32
        if number < share and (most is None or len(chosen) < most):
            chosen.add(source)
        source_lines, target_lines = set_aside if source in chosen else kept
        source_lines.append(source)
        target_lines.append(target)
    return Text(*kept), Text(*set_aside)


def _first_translations(text: Text) -> Text:
    first = dict(reversed(list(zip(*text, strict=True))))
    return Text(list(first), list(first.values()))
