"""The text of an experiment: training, validation and test pairs."""

import hashlib
from typing import NamedTuple

from experiments.harness import datasets, display
from experiments.harness.text_io import lines_digest
from experiments.translation.grammar import make_corpus
from experiments.translation.presets import DataConfig, Files
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.data import read_pairs, read_tab_pairs


class Text(NamedTuple):
    """Parallel lines: `target[i]` translates `source[i]`."""

    source: list[str]
    target: list[str]


class Corpus(NamedTuple):
    """The three parts of a corpus; `test` may be empty."""

    train: Text
    validation: Text
    test: Text


def load_corpus(config: DataConfig) -> Corpus:
    """The text that `config` names. Raises `DataError` for a file that cannot be read or found.

    Files given for training replace the whole built-in corpus; without validation files, about
    one source in fifty, chosen by its hash and at most 1,000, is set aside with its translations.
    """
    if config.train != Files():
        corpus = _from_files(config)
    elif config.corpus in _BUILT_IN:
        corpus = _BUILT_IN[config.corpus]()
    else:
        raise ConfigError(
            f"corpus={config.corpus!r} comes from files: give --data.train.source FILE and "
            f"--data.train.target FILE, or one of the corpora {', '.join(_BUILT_IN)}"
        )
    validation = read_files(config.validation) or corpus.validation
    return corpus._replace(validation=validation, test=read_files(config.test) or corpus.test)


def fingerprint(text: Text) -> str:
    """SHA-256 (hex) of all lines of both sides."""
    return lines_digest(*text)


def read_files(files: Files) -> Text | None:
    """The text of two files, or None where none are given.

    Raises `ConfigError` for one without the other, `DataError` as `read_pairs` does.
    """
    if files == Files():
        return None
    if not files.source or not files.target:
        raise ConfigError(
            f"parallel text needs both files, but source={files.source!r} and "
            f"target={files.target!r} were given"
        )
    return Text(*read_pairs(files.source, files.target))


def _from_files(config: DataConfig) -> Corpus:
    text = read_files(config.train)
    assert text is not None  # only files lead here
    if config.validation != Files():
        return Corpus(text, Text([], []), Text([], []))
    train, validation = _split(text, lambda share: share < 0.02, most=1_000)
    if not validation.source:
        raise DataError(
            f"{config.train.source}: {len(text.source)} pairs are too few to set some aside for "
            "validation: give --data.validation.source FILE and --data.validation.target FILE"
        )
    return Corpus(train, validation, Text([], []))


def _grammar() -> Corpus:
    with display.phase("making 60,000 pairs of sentences"):
        parts = make_corpus(train=60_000, validation=1_000, test=1_000, seed=0)
    names = ("train", "validation", "test")
    return Corpus(*(Text(*map(list, zip(*parts[name], strict=True))) for name in names))


def _multi30k() -> Corpus:
    parts = []
    for part in ("train", "val", "test_2016_flickr"):
        paths = (datasets.find("multi30k", f"{part}.{side}.gz") for side in ("en", "de"))
        parts.append(Text(*read_pairs(*paths)))
    return Corpus(*parts)


def _tatoeba() -> Corpus:
    text = Text(*read_tab_pairs(datasets.find("tatoeba-deu-eng", "deu.txt.gz")))
    # Split by English sentence: no test sentence is in the training text with another translation.
    train, rest = _split(text, lambda share: share < 0.02)
    validation, test = _split(rest, lambda share: share < 0.01)
    return Corpus(train, _first_translations(validation), _first_translations(test))


_BUILT_IN = {"grammar": _grammar, "multi30k": _multi30k, "tatoeba": _tatoeba}


def _split(text: Text, aside, most: int | None = None) -> tuple[Text, Text]:
    """(the rest, pairs set aside): those whose source has a hash, 0 to 1, that is `aside`.

    At most `most` sources are set aside; all pairs of one source stay together.
    """
    kept, set_aside = Text([], []), Text([], [])
    sources: set[str] = set()
    for source, target in zip(*text, strict=True):
        share = int(hashlib.sha256(source.encode()).hexdigest()[:8], 16) / 2**32
        if aside(share) and (most is None or len(sources) < most):
            sources.add(source)
        chosen = set_aside if source in sources else kept
        chosen.source.append(source)
        chosen.target.append(target)
    return kept, set_aside


def _first_translations(text: Text) -> Text:
    first = dict(reversed(list(zip(*text, strict=True))))
    return Text(list(first), list(first.values()))
