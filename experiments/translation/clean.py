"""Cleans pairs: `python -m experiments.translation.clean --source F --target F --output OUT`.

Writes OUT.source and OUT.target with the pairs that are kept, in order, and says how many were
dropped and why. A pair counts under the first reason that applies. Pairs are read and written one
after the other. To find duplicates, memory holds a number of 64 bits for each pair, which takes
about 100 bytes in a set of Python.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from experiments.harness import cli
from experiments.harness.results.text_statistics import digest, report, share
from experiments.harness.runs import sources
from experiments.translation.presets import Files
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError, DataError


@dataclass(frozen=True)
class CleanOptions(Files):
    """The pairs to read, what is dropped, and where the others go."""

    output: str = "clean"
    """The files OUTPUT.source and OUTPUT.target are written."""
    max_words: int = 250
    """Longest side, in words separated by white space; 0: any length."""
    max_ratio: float = 1.5
    """Greatest ratio of words of the longer to the shorter side, from 6 words on; 0: any ratio."""
    keep_duplicates: bool = False
    """Keeps a pair that occurred before."""
    keep_copies: bool = False
    """Keeps a pair with the same text on both sides."""
    language_id: str = ""
    """Your own function from a text to its language code, as package.module:name; empty: none."""
    source_language: str = "en"
    """The code that --language_id has to give for the source text."""
    target_language: str = "de"
    """The code that --language_id has to give for the target text."""

    def __post_init__(self):
        check_at_least(self, 0, "max_words", "max_ratio")


def main(options: CleanOptions) -> None:
    """Writes the pairs that are kept, and prints what was dropped."""
    counts = clean(options)
    total = sum(counts.values())
    rows = {name: share(count, total) for name, count in counts.items()}
    print(report({f"{total:,} pairs": rows}))
    print(json.dumps({"pairs": total, **counts}))


def clean(options: CleanOptions) -> dict[str, int]:
    """Writes the pairs that are kept; the number of pairs kept, and dropped by reason."""
    checks = reasons(options)
    counts = dict.fromkeys(["kept", *checks], 0)
    paths = [Path(f"{options.output}.{side}") for side in ("source", "target")]
    with ExitStack() as stack:
        unfinished = [path.with_name(f"{path.name}.unfinished") for path in paths]
        files = [stack.enter_context(open(x, "w", encoding="utf-8")) for x in unfinished]
        for pair in read(options):
            reason = next((name for name, applies in checks.items() if applies(*pair)), "kept")
            counts[reason] += 1
            if reason == "kept":
                for file, text in zip(files, pair, strict=True):
                    file.write(text.replace("\n", " ") + "\n")
    for path, new in zip(paths, unfinished, strict=True):
        new.replace(path)
    return counts


def read(files: Files) -> Iterator[tuple[str, str]]:
    """The pairs of `files`; `DataError` where one side ends before the other."""
    if not files.source:
        raise ConfigError("there is no text: give --source FILE and --target FILE")
    fields = files.source_field, files.target_field
    if not files.target:
        yield from ((a, b) for a, b in sources.iterate_both(files.source, fields))
        return
    sides = zip((files.source, files.target), fields, strict=True)
    texts = (sources.read_texts(*side) for side in sides)
    for number, (source, target) in enumerate(zip_longest(*texts), start=1):
        if source is None or target is None:
            short = files.source if source is None else files.target
            raise DataError(f"{short} ends before text {number} of the other side")
        yield source, target


def reasons(options: CleanOptions) -> dict[str, Callable[[str, str], bool]]:
    """The checks that `options` ask for, in order: whether a pair is to be dropped, by reason."""
    seen: set[int] = set()

    def is_long(source: str, target: str) -> bool:
        return max(len(source.split()), len(target.split())) > options.max_words

    def is_uneven(source: str, target: str) -> bool:
        shorter, longer = sorted((len(source.split()), len(target.split())))
        return longer >= 6 and longer > options.max_ratio * shorter

    def is_foreign(source: str, target: str) -> bool:
        identify = cli.import_by_name(options.language_id, "language_id")
        languages = options.source_language, options.target_language
        return (identify(source), identify(target)) != languages

    def is_repeated(source: str, target: str) -> bool:
        count = len(seen)
        seen.add(digest(f"{source}\t{target}"))
        return len(seen) == count

    checks: list[tuple[bool, str, Callable[[str, str], bool]]] = [
        (True, "empty", lambda a, b: not a.strip() or not b.strip()),
        (not options.keep_copies, "same text on both sides", lambda a, b: a.strip() == b.strip()),
        (options.max_words > 0, "too long", is_long),
        (options.max_ratio > 0, "length ratio", is_uneven),
        (options.language_id != "", "language", is_foreign),
        (not options.keep_duplicates, "duplicate", is_repeated),
    ]
    return {name: applies for is_on, name, applies in checks if is_on}


if __name__ == "__main__":
    cli.start(main, {"default": CleanOptions()}, __doc__)
