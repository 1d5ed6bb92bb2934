"""Random words and phrases, from which `sentences` builds random clauses."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.translation.grammar import lexicon as lex
from experiments.translation.grammar.derivation import Clause, Coordination, Nominal, NounPhrase
from experiments.translation.grammar.english import english_number
from experiments.translation.grammar.german import german_number
from experiments.translation.grammar.lexicon import Adjective, FixedPhrase, Noun, Pronoun

Rng = np.random.Generator
Kinds = tuple[str, ...]
Choice = TypeVar("Choice")


class Style(NamedTuple):
    """The tenses of a clause, and the probabilities of its optional parts."""

    tenses: tuple[str, ...]
    adjectives: float = 0.4
    times: float = 0.3
    negations: float = 0.12
    coordinations: float = 0.06


# "I" and "you" come twice because no noun shares their verb forms.
SUBJECT_PRONOUNS = lex.PRONOUNS + lex.PRONOUNS[:2]
SAME_PERSON = {"I": ("I", "we"), "we": ("I", "we"), "you": ("you",)}
YESTERDAY, TODAY, TOMORROW, NOW, EVERY_DAY = (
    lex.TIMES[name] for name in ("yesterday", "today", "tomorrow", "now", "every day")
)


def pick(rng: Rng, options: Sequence[Choice]) -> Choice:
    """Return one of the options, all equally likely."""
    # Generator.integers takes six times as long, and most of the time is spent here.
    return options[int(rng.random() * len(options))]


def pick_weighted(rng: Rng, weights: dict[str, int]) -> str:
    """Return one of the names, in proportion to its weight."""
    draw = rng.random() * sum(weights.values())
    bounds = zip(weights, accumulate(weights.values()), strict=True)
    return next(name for name, bound in bounds if draw < bound)


def sample_other(
    rng: Rng, clause: Clause, kinds: Kinds, style: Style, determiners: str, pronouns: float
) -> NounPhrase | Pronoun:
    """Return a noun phrase, or a pronoun (probability `pronouns`), unlike the clause's subject."""
    subject = clause.subject
    if "person" in kinds and rng.random() < pronouns:
        same = SAME_PERSON.get(subject.english, ()) if isinstance(subject, Pronoun) else ()
        return pick(rng, [pronoun for pronoun in lex.PRONOUNS if pronoun.english not in same])
    phrase = sample_noun_phrase(rng, kinds, style, determiners)
    while isinstance(subject, NounPhrase) and phrase.noun == subject.noun:
        phrase = sample_noun_phrase(rng, kinds, style, determiners)
    return phrase


def sample_subject(rng: Rng, kinds: Kinds, style: Style, determiners: str) -> Nominal:
    """Return a pronoun, a noun phrase or a coordination of two."""
    if "person" in kinds and rng.random() < 0.28:
        return pick(rng, SUBJECT_PRONOUNS)
    if rng.random() < style.coordinations:
        plain = style._replace(adjectives=0.0)
        first = sample_noun_phrase(rng, kinds, plain, "definite")
        second = sample_noun_phrase(rng, (first.noun.kind,), plain, "definite")
        if first.noun != second.noun:
            return Coordination(first, second)
    return sample_noun_phrase(rng, kinds, style, determiners)


def sample_noun_phrase(rng: Rng, kinds: Kinds, style: Style, determiners: str) -> NounPhrase:
    """Return a noun phrase whose noun is of one of the kinds."""
    noun = pick(rng, _nouns_of(kinds))
    has_adjective = rng.random() < style.adjectives
    adjective = pick(rng, adjectives_of(noun.kind)) if has_adjective else None
    if noun.kind in lex.MASS:
        return NounPhrase(noun, pick(rng, lex.DETERMINERS["mass"][0]), adjective=adjective)
    singular, plural = lex.DETERMINERS[determiners]
    if rng.random() < 0.7:
        return NounPhrase(noun, pick(rng, singular), adjective=adjective)
    determiner = pick(rng, plural)
    if determiner == "count":
        most = 99 if noun.kind in lex.LIVING + lex.PLACES else 999
        return NounPhrase(noun, "", True, adjective, sample_number(rng, most))
    return NounPhrase(noun, determiner, True, adjective)


@cache
def _nouns_of(kinds: Kinds) -> tuple[Noun, ...]:
    return tuple(noun for noun in lex.NOUNS if noun.kind in kinds)


@cache
def adjectives_of(kind: str) -> tuple[Adjective, ...]:
    """Return the adjectives that describe a kind of noun."""
    return tuple(adjective for adjective in lex.ADJECTIVES if kind in adjective.kinds)


def sample_number(rng: Rng, most: int, *, is_count: bool = True) -> int:
    """Return a number from 2 to `most`, more often a small one.

    A count does not end in "hundred one": Germans disagree about the form of such a count, but
    not about a room number.
    """
    draw = rng.random()
    low, high = (2, 12) if draw < 0.25 else (13, 99) if draw < 0.65 else (100, 999)
    if most < high:
        low, high = 2, most
    number = low + int(rng.random() * (high - low + 1))
    return number + 1 if is_count and number % 100 == 1 else number


def with_number(number: int, english: str, german: str) -> FixedPhrase:
    """Return the phrase in which the number replaces the {} of both texts."""
    return FixedPhrase(english.format(english_number(number)), german.format(german_number(number)))


def sample_time(rng: Rng, clause: Clause) -> FixedPhrase:
    """Return a time that suits the verb, the tense and the negation of the clause."""
    tense = clause.tense
    if clause.verb.frame == "copula":  # nobody is old on Mondays
        return pick(rng, (YESTERDAY, TODAY) if tense == "past" else (TODAY, NOW))
    if tense == "perfect":
        return TODAY
    draw = rng.random()
    if draw < 0.4:
        return pick(rng, [*lex.DAYS.values()])
    if draw < 0.5:
        return with_number(1 + int(rng.random() * 12), "at {}", "um {}")
    if draw < 0.65:
        return pick(rng, [*lex.DAYTIMES.values()])
    if tense == "past" or (tense in lex.MODALS and lex.MODALS[tense].past):
        return YESTERDAY if draw < 0.85 else TODAY
    if draw < 0.75:
        return TODAY
    if tense == "present":
        return NOW if clause.negated or draw < 0.88 else EVERY_DAY
    return TOMORROW
