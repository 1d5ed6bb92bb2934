"""Random choices of words and phrases, the small change of the rules."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.translation.grammar import lexicon as lex
from experiments.translation.grammar.lexicon import Adjective, Noun, Pronoun
from experiments.translation.grammar.numerals import english_number, german_number
from experiments.translation.grammar.trees import (
    Clause,
    Coordination,
    Invariable,
    Nominal,
    NounPhrase,
)

Choice = TypeVar("Choice")


class Determiners(NamedTuple):
    """What may stand before a noun; a word written twice is chosen twice as often."""

    singular: tuple[str, ...]
    plural: tuple[str, ...]
    mass: tuple[str, ...] = ("", "", "the", "my", "your", "his", "her", "our", "their")


class Style(NamedTuple):
    """How rich a clause is: its tenses and the shares of adjectives, times and negations."""

    tenses: tuple[str, ...]
    adjectives: float = 0.4
    times: float = 0.3
    negations: float = 0.12
    coordinations: float = 0.06


POSSESSIVES = tuple(lex.POSSESSIVES)
SUBJECT = Determiners(
    ("the",) * 10 + ("a",) * 4 + ("this", "this", "every") + POSSESSIVES,
    ("the",) * 6 + ("",) * 3 + ("this", "this", "count", "count") + POSSESSIVES,
)
OBJECT = Determiners(
    ("the",) * 7 + ("a",) * 7 + ("this", "every") + POSSESSIVES,
    ("the",) * 4 + ("",) * 5 + ("this", "count", "count", "count") + POSSESSIVES,
)
DENIED = Determiners(
    ("the",) * 5 + ("a",) * 7 + ("this",) + POSSESSIVES,
    ("the",) * 4 + ("",) * 6 + ("this",) + POSSESSIVES,
)
DEFINITE = Determiners(
    ("the",) * 8 + ("this",) + POSSESSIVES, ("the",) * 8 + ("this",) + POSSESSIVES
)
BESIDE = Determiners(
    ("the",) * 8 + ("a",) * 5 + ("this",) + POSSESSIVES,
    ("the",) * 6 + ("",) * 3 + ("this",) + POSSESSIVES,
)
ANTECEDENT = Determiners(("the", "the", "the", "a"), ("the", "the", ""))

# I and you have verb forms of their own, the others share theirs with nouns.
SUBJECT_PRONOUNS = lex.PRONOUNS + lex.PRONOUNS[:2]
TODAY = Invariable("today", "heute")
TOMORROW = Invariable("tomorrow", "morgen")
YESTERDAY = Invariable("yesterday", "gestern")
PRESENTLY = Invariable("now", "jetzt")
DAILY = Invariable("every day", "jeden Tag")
PARTS = (Invariable("in the morning", "am Morgen"), Invariable("in the evening", "am Abend"))


def pick(rng: np.random.Generator, options: Sequence[Choice]) -> Choice:
    """Return one of the options, each as likely as the others."""
    # Six times as fast as Generator.integers, and a draw is most of the work here.
    return options[int(rng.random() * len(options))]


def weighted(rng: np.random.Generator, table: tuple[tuple[str, int], ...]) -> str:
    """Return a name from a table of names and weights, as often as its weight asks."""
    names, bounds = _bounds(table)
    draw = rng.random() * bounds[-1]
    return next(name for name, bound in zip(names, bounds, strict=True) if draw < bound)


@cache
def _bounds(table: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names, weights = zip(*table, strict=True)
    return names, tuple(accumulate(weights))


def somebody_else(
    rng: np.random.Generator,
    made: Clause,
    kinds: tuple[str, ...],
    style: Style,
    determiners: Determiners,
    pronouns: float,
) -> NounPhrase | Pronoun:
    """Return somebody or something that is not the subject of the clause."""
    subject = made.subject
    if "person" in kinds and rng.random() < pronouns:
        options = lex.PRONOUNS
        if isinstance(subject, Pronoun):
            options = _others(subject.english)
        return pick(rng, options)
    phrase = some_noun_phrase(rng, kinds, style, determiners)
    while isinstance(subject, NounPhrase) and phrase.noun is subject.noun:
        phrase = some_noun_phrase(rng, kinds, style, determiners)
    return phrase


@cache
def _others(subject: str) -> tuple[Pronoun, ...]:
    barred = {"I": "I we", "we": "I we", "you": "you"}.get(subject, "").split()
    return tuple(pronoun for pronoun in lex.PRONOUNS if pronoun.english not in barred)


def some_subject(
    rng: np.random.Generator,
    kinds: tuple[str, ...],
    style: Style,
    determiners: Determiners,
    negated: bool = False,
) -> Nominal:
    """Return a subject: a pronoun, a noun phrase or two of them; a denied one is definite."""
    if "person" in kinds and rng.random() < 0.28:
        return pick(rng, SUBJECT_PRONOUNS)
    if rng.random() < style.coordinations:
        plainer = style._replace(adjectives=0.0)
        first = some_noun_phrase(rng, kinds, plainer, DEFINITE)
        second = some_noun_phrase(rng, (first.noun.kind,), plainer, DEFINITE)
        if first.noun is not second.noun:
            return Coordination(first, second)
    return some_noun_phrase(rng, kinds, style, DEFINITE if negated else determiners)


def some_noun_phrase(
    rng: np.random.Generator, kinds: tuple[str, ...], style: Style, determiners: Determiners
) -> NounPhrase:
    """Return a noun phrase about something of one of the kinds."""
    noun = pick(rng, _nouns_of(kinds))
    adjective = None
    if rng.random() < style.adjectives:
        adjective = pick(rng, adjectives_of(noun.kind))
    if noun.kind in lex.MASS:
        return NounPhrase(noun, pick(rng, determiners.mass), adjective=adjective)
    if rng.random() < 0.7:
        return NounPhrase(noun, pick(rng, determiners.singular), adjective=adjective)
    determiner = pick(rng, determiners.plural)
    if determiner == "count":
        most = 99 if noun.kind in lex.LIVING + lex.PLACES else 999
        return NounPhrase(noun, "", True, adjective, some_number(rng, most, True))
    return NounPhrase(noun, determiner, True, adjective)


@cache
def _nouns_of(kinds: tuple[str, ...]) -> tuple[Noun, ...]:
    return tuple(noun for noun in lex.NOUNS if noun.kind in kinds)


@cache
def adjectives_of(kind: str) -> tuple[Adjective, ...]:
    """Return the adjectives that fit a kind of noun."""
    return tuple(adjective for adjective in lex.ADJECTIVES if kind in adjective.kinds)


def some_number(rng: np.random.Generator, most: int, counts: bool) -> int:
    """Return 2 to `most`, small ones more often; a count never ends in "hundred one".

    German speakers do not agree on how to count 101 books, only on how to call room 101.
    """
    draw = rng.random()
    low, high = (2, 12) if draw < 0.25 else (13, 99) if draw < 0.65 else (100, 999)
    if most < high:
        low, high = 2, most
    number = low + int(rng.random() * (high - low + 1))
    return number + 1 if counts and number % 100 == 1 else number


def some_time_of_a_state(rng: np.random.Generator, tense: str) -> Invariable:
    """Return a time at which something is or was so: nobody is old on Mondays."""
    return pick(rng, (YESTERDAY, TODAY) if tense == "past" else (TODAY, PRESENTLY))


def some_time(rng: np.random.Generator, tense: str, negated: bool) -> Invariable:
    """Return a time that goes with the tense."""
    if tense == "perfect":
        return TODAY
    past = tense == "past" or (tense in lex.MODALS and lex.MODALS[tense].past)
    draw = rng.random()
    if draw < 0.4:
        day = pick(rng, tuple(lex.DAYS))
        return Invariable(f"on {day}", f"am {lex.DAYS[day]}")
    if draw < 0.5:
        hour = 1 + int(rng.random() * 12)
        return Invariable(f"at {english_number(hour)}", f"um {german_number(hour)}")
    if draw < 0.65:
        return pick(rng, PARTS)
    if past:
        return YESTERDAY if draw < 0.85 else TODAY
    if draw < 0.75:
        return TODAY
    if tense == "present":
        return PRESENTLY if negated or draw < 0.88 else DAILY
    return TOMORROW
