"""The lexicon: English words and their German forms, read from the files in tables/.

The first line of a table names its columns; they are the fields of a named tuple, where there is
one below. Two or more spaces separate columns, and "-" is an empty cell. In a cell of several
words, "the*3" is one word three times, and a name of `GROUPS` stands for its words.
"""

import re
from collections.abc import Callable
from enum import IntEnum
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

LIVING = ("person", "animal")
OBJECTS = ("thing", "text", "vehicle")
PLACES = ("building", "area")
MASS = ("drink", "staple")
GROUPS = {
    "living": LIVING,
    "objects": OBJECTS,
    "places": PLACES,
    "mass": MASS,
    "countable": (*LIVING, *OBJECTS, *PLACES, "food"),
    "possessives": ("my", "your", "his", "her", "our", "their"),
    "none": ("",),
}
THIRD_SINGULAR, THIRD_PLURAL = 2, 4  # where persons are counted I, you, he, we, they


class Case(IntEnum):
    """A German case, the index of a form in a table of endings."""

    NOMINATIVE = 0
    ACCUSATIVE = 1
    DATIVE = 2


class Noun(NamedTuple):
    """A noun; a mass noun has no plural."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str  # m, f or n
    kind: str
    weak: bool  # n-declension: "den Jungen"


class Adjective(NamedTuple):
    """An adjective and the kinds of noun that it describes."""

    english: str
    german: str
    stem: str  # before endings, where it differs: "teur" of "teuer"
    kinds: tuple[str, ...]


class Pronoun(NamedTuple):
    """A personal pronoun; `german` has one form for each case."""

    english: str
    english_object: str
    german: tuple[str, ...]
    person: int


class Preposition(NamedTuple):
    """A preposition, the case that it takes in German, and its role: location, direction, ..."""

    english: str
    german: str
    case: Case
    role: str = ""


class Conjunction(NamedTuple):
    """A conjunction; after a subordinating one the German verb comes last."""

    english: str
    german: str
    subordinating: bool
    english_comma: bool
    german_comma: bool


class FixedPhrase(NamedTuple):
    """An expression with one form in each language: "in the evening", "am Abend"."""

    english: str
    german: str


class Verb(NamedTuple):
    """A verb, its frame (what it combines with), and its possible subjects and objects.

    With a `german_preposition` the object is prepositional in both languages: "wait for", "warten
    auf". Without one, `preposition` is English only: "look for", "suchen".
    """

    frame: str
    english: str
    past: str
    participle: str
    particle: str  # English, after the object: "throws it away"
    preposition: str  # English, before the object: "looks for it"
    german: str
    stem: str  # of the second and third person singular, where it differs: "sieh"
    prefix: str  # German, separable: "steht ... auf"
    perfect: tuple[str, ...]  # German: "ist gegangen"
    german_preposition: str
    case: Case  # of the German object
    subjects: tuple[str, ...]
    objects: tuple[str, ...]


class Modal(NamedTuple):
    """A modal verb; `german` has one form for each person.

    A modal with an `infinitive` takes do-support: "does not want to", "did you have to".
    """

    english: str
    english_third: str
    german: tuple[str, ...]
    past: bool
    infinitive: str
    only_negated: bool  # do-support in negation, not in questions


Entry = TypeVar("Entry")


def _words(cell: str) -> tuple[str, ...]:
    words: list[str] = []
    for word in cell.split():
        name, _, times = word.partition("*")
        words += GROUPS.get(name, (name,)) * int(times or 1)
    return tuple(words)


CONVERTERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    bool: bool,
    int: int,
    Case: lambda cell: Case[cell.upper() or "ACCUSATIVE"],
    tuple[str, ...]: _words,
}


def _rows(table: str) -> list[list[str]]:
    lines = (Path(__file__).parent / "tables" / f"{table}.txt").read_text("utf-8").splitlines()
    rows = [["" if cell == "-" else cell for cell in re.split(" {2,}", line)] for line in lines]
    for number, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"{table}.txt, line {number} has {len(row)} columns, line 1 has {len(rows[0])}: "
                "put two or more spaces between columns, and - in an empty one"
            )
    return rows


def _read(table: str, entry: Callable[..., Entry]) -> tuple[Entry, ...]:
    header, *rows = _rows(table)
    converters = [CONVERTERS[get_type_hints(entry)[column]] for column in header]
    cells = [[read(cell) for read, cell in zip(converters, row, strict=True)] for row in rows]
    return tuple(entry(**dict(zip(header, row, strict=True))) for row in cells)


NOUNS = _read("nouns", Noun)
ADJECTIVES = _read("adjectives", Adjective)
PRONOUNS = _read("pronouns", Pronoun)
PREPOSITIONS = {entry.english: entry for entry in _read("prepositions", Preposition)}
CONJUNCTIONS = {entry.english: entry for entry in _read("conjunctions", Conjunction)}
VERBS = {frame: tuple(verbs) for frame, verbs in groupby(_read("verbs", Verb), lambda v: v.frame)}
MODALS = {entry.english: entry for entry in _read("modals", Modal)}
# The irregular forms of English and German verbs by (verb, tense), one for each person.
IRREGULAR = {(verb, tense): forms.split() for verb, tense, forms in _rows("irregular")[1:]}
# The determiners of singular and plural nouns; "count" is a number.
DETERMINERS = {name: (_words(one), _words(many)) for name, one, many in _rows("determiners")[1:]}
NUMERALS = {int(number): FixedPhrase(*words) for number, *words in _rows("numerals")[1:]}
POSSESSIVES, QUESTION_WORDS, DAYS, DAYTIMES, TIMES = (
    {words[0]: FixedPhrase(*words) for *words, k in _rows("fixed_phrases") if k == kind}
    for kind in ("possessive", "question", "day", "daytime", "time")
)
# How often a kind of sentence, or a verb's frame, occurs.
SENTENCE_WEIGHTS, FRAME_WEIGHTS = (
    {name: int(weight) for k, name, weight, _ in _rows("weights") if k == kind}
    for kind in ("sentence", "frame")
)


def split_hundreds(number: int) -> tuple[int, int]:
    """Both parts of a number from 0 to 999; `ValueError` for another one."""
    if not 0 <= number <= 999:
        raise ValueError(f"number words exist for 0 to 999, not for {number}: give a smaller one")
    return divmod(number, 100)
