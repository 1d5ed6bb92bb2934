"""Random words, phrases, clauses and sentences."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.translation.grammar import lexicon as lex
from experiments.translation.grammar.derivation import (
    Adjunct,
    Clause,
    Coordination,
    Nominal,
    NounPhrase,
    Sentence,
)
from experiments.translation.grammar.english import english_number
from experiments.translation.grammar.german import german_number
from experiments.translation.grammar.lexicon import (
    Adjective,
    Case,
    FixedPhrase,
    Noun,
    Preposition,
    Pronoun,
)

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


PRESENT = ("present",) * 6 + ("can", "must", "want to", "should", "may", "will")
PAST = ("past",) * 4 + ("perfect",) * 3 + ("could", "had to", "wanted to")
FULL = Style(PRESENT + PAST)
SHORT = Style(PRESENT + PAST, adjectives=0.2, times=0.15, coordinations=0.0)
TIMELESS = SHORT._replace(times=0.0)
TIMELESS_PRESENT = TIMELESS._replace(tenses=PRESENT)
CONDITION = TIMELESS._replace(tenses=("present",) * 6 + ("can", "must", "want to", "may"))

# Two conjunctions, the probability of the first one, and the styles of the two clauses.
LINKED = {
    "reason": ("because", 0.65, "although", SHORT, TIMELESS),
    "condition": ("when", 0.5, "if", TIMELESS_PRESENT, CONDITION),
    "coordinated": ("and", 0.6, "but", TIMELESS, TIMELESS),
}
# The tenses of a frame that does not allow all of them.
FRAME_TENSES = {
    "copula": ("present", "past"),
    "price": ("present",),
    "age": ("present",),
    "possession": ("past", "wanted to", *PRESENT),
}
MEASURES = ("price", "age")  # frames without negation and time
# The verbs of food and drink come twice, because few verbs take their nouns.
TRANSITIVE = lex.VERBS["transitive"]
MASS_VERBS = tuple(verb for verb in TRANSITIVE if set(verb.objects) & set(lex.MASS))
VERBS = lex.VERBS | {"transitive": TRANSITIVE + MASS_VERBS}
SIMPLE_TRANSITIVE = [verb for verb in TRANSITIVE if not verb.particle and not verb.preposition]
LOCATIONS = tuple(p for p in lex.PREPOSITIONS.values() if p.role == "location")
COMPANY = tuple(p for p in lex.PREPOSITIONS.values() if p.role == "company")
DIRECTIONS = tuple(lex.PREPOSITIONS[name] for name in ("into", "into", "out of", "to", "to"))
# "I" and "you" come twice because no noun shares their verb forms.
SUBJECT_PRONOUNS = lex.PRONOUNS + lex.PRONOUNS[:2]
SAME_PERSON = {"I": ("I", "we"), "we": ("I", "we"), "you": ("you",)}
YESTERDAY, TODAY, TOMORROW, NOW, EVERY_DAY = (
    lex.TIMES[name] for name in ("yesterday", "today", "tomorrow", "now", "every day")
)


def pick(rng: Rng, options: Sequence[Choice]) -> Choice:
    """One of the options, all equally likely."""
    # Generator.integers takes six times as long, and most of the time is spent here.
    return options[int(rng.random() * len(options))]


def pick_weighted(rng: Rng, weights: dict[str, int]) -> str:
    """One of the names, in proportion to its weight."""
    draw = rng.random() * sum(weights.values())
    bounds = zip(weights, accumulate(weights.values()), strict=True)
    return next(name for name, bound in bounds if draw < bound)


def sample_other(
    rng: Rng, clause: Clause, kinds: Kinds, style: Style, determiners: str, pronouns: float
) -> NounPhrase | Pronoun:
    """A noun phrase, or a pronoun (probability `pronouns`), unlike the clause's subject."""
    subject = clause.subject
    if "person" in kinds and rng.random() < pronouns:
        same = SAME_PERSON.get(subject.english, ()) if isinstance(subject, Pronoun) else ()
        return pick(rng, [pronoun for pronoun in lex.PRONOUNS if pronoun.english not in same])
    phrase = sample_noun_phrase(rng, kinds, style, determiners)
    while isinstance(subject, NounPhrase) and phrase.noun == subject.noun:
        phrase = sample_noun_phrase(rng, kinds, style, determiners)
    return phrase


def sample_subject(rng: Rng, kinds: Kinds, style: Style, determiners: str) -> Nominal:
    """A pronoun, a noun phrase or a coordination of two."""
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
    """A noun phrase whose noun is of one of the kinds."""
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
    """The adjectives that describe a kind of noun."""
    return tuple(adjective for adjective in lex.ADJECTIVES if kind in adjective.kinds)


def sample_number(rng: Rng, most: int, *, is_count: bool = True) -> int:
    """A number from 2 to `most`, more often a small one.

    A count does not end in "hundred one": Germans disagree about the form of such a count, but
    not about a room number.
    """
    draw = rng.random()
    low, high = 100, 999
    if draw < 0.25:
        low, high = 2, 12
    elif draw < 0.65:
        low, high = 13, 99
    if most < high:
        low, high = 2, most
    number = low + int(rng.random() * (high - low + 1))
    return number + 1 if is_count and number % 100 == 1 else number


def with_number(number: int, english: str, german: str) -> FixedPhrase:
    """The phrase in which the number replaces the {} of both texts."""
    return FixedPhrase(english.format(english_number(number)), german.format(german_number(number)))


def sample_time(rng: Rng, clause: Clause) -> FixedPhrase:
    """A time that suits the verb, the tense and the negation of the clause."""
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


def sample_sentence(rng: Rng) -> Sentence:
    """A random derivation."""
    kind = pick_weighted(rng, lex.SENTENCE_WEIGHTS)
    if kind in LINKED:
        return _two_clauses(rng, *LINKED[kind])
    sample = {"relative": _with_relative, "reported": _reported, "question": _question}
    return sample.get(kind, _plain)(rng)


def _plain(rng: Rng) -> Sentence:
    main = sample_clause(rng, FULL)
    if main.time and rng.random() < 0.4:
        return Sentence(main._replace(time=None), fronted=main.time)
    is_place = isinstance(main.adjunct, Adjunct) and main.adjunct.preposition.role == "location"
    if main.verb.frame == "activity" and is_place and not main.negated and rng.random() < 0.35:
        return Sentence(main._replace(adjunct=None), fronted=main.adjunct)
    return Sentence(main)


def _two_clauses(
    rng: Rng, usual: str, probability: float, other: str, first: Style, second: Style
) -> Sentence:
    conjunction = lex.CONJUNCTIONS[usual if rng.random() < probability else other]
    second_first = conjunction.subordinating and rng.random() < 0.4
    main = sample_clause(rng, first)
    linked = sample_clause(rng, second)
    return Sentence(main, conjunction=conjunction, second=linked, second_first=second_first)


def _reported(rng: Rng) -> Sentence:
    is_asked = rng.random() < 0.25
    verb = VERBS["interrogative"][0] if is_asked else pick(rng, VERBS["clausal"])
    negated = verb.english == "know" and rng.random() < 0.5
    subject = sample_subject(rng, verb.subjects, SHORT, "definite" if negated else "subject")
    tense = "past" if rng.random() < 0.35 else "present"
    conjunction = lex.CONJUNCTIONS["whether" if is_asked or negated else "that"]
    main = Clause(subject, verb, tense, negated)
    return Sentence(main, conjunction=conjunction, second=sample_clause(rng, SHORT))


def _question(rng: Rng) -> Sentence:
    question = pick(rng, ("yes-no", "yes-no", "yes-no", "why", "when", "where"))
    if question == "where":
        verb = pick(rng, VERBS["activity"] + VERBS["location"])
        subject = sample_subject(rng, verb.subjects, SHORT, "definite")
        return Sentence(Clause(subject, verb, pick(rng, SHORT.tenses)), question=question)
    style = (TIMELESS if question == "when" else SHORT)._replace(negations=0.0)
    main = sample_clause(rng, style)
    while question == "when" and main.verb.frame in ("copula", *MEASURES):
        main = sample_clause(rng, style)
    return Sentence(main, question=question)


def _with_relative(rng: Rng) -> Sentence:
    main = sample_clause(rng, SHORT)
    while not isinstance(main.subject, NounPhrase):
        main = sample_clause(rng, SHORT)
    kind = main.subject.noun.kind
    determiners = lex.DETERMINERS["antecedent"][main.subject.plural]
    antecedent = main.subject._replace(determiner=pick(rng, determiners), number=0)
    if kind in lex.LIVING and rng.random() < 0.6:
        clause = sample_clause(rng, TIMELESS, antecedent)
        return Sentence(main._replace(subject=clause.subject), relative=clause)
    verb = pick(rng, [verb for verb in SIMPLE_TRANSITIVE if kind in verb.objects])
    subject = sample_subject(rng, ("person",), TIMELESS, "definite")
    clause = Clause(subject, verb, pick(rng, TIMELESS.tenses))
    main = main._replace(subject=antecedent)
    return Sentence(main, relative=clause, relative_is_object=True)


def sample_clause(rng: Rng, style: Style, subject: NounPhrase | None = None) -> Clause:
    """A clause, about the given subject if there is one."""
    verbs: list[lex.Verb] = []
    while not verbs:
        frame = pick_weighted(rng, lex.FRAME_WEIGHTS)
        verbs = [v for v in VERBS[frame] if not subject or subject.noun.kind in v.subjects]
    verb = pick(rng, verbs)
    tense = pick(rng, style.tenses)
    if tense not in FRAME_TENSES.get(verb.frame, style.tenses):
        tense = "present"
    is_measure = verb.frame in MEASURES
    negated = not is_measure and rng.random() < style.negations
    determiners = "definite" if negated else "subject"
    who = subject or sample_subject(rng, verb.subjects, style, determiners)
    clause = Clause(who, verb, tense, negated)
    if not is_measure and rng.random() < style.times:
        clause = clause._replace(time=sample_time(rng, clause))
    return _complete(rng, clause, style)


def _complete(rng: Rng, clause: Clause, style: Style) -> Clause:
    """The clause with the objects, complement or adjunct of its frame."""
    match clause.verb.frame:
        case "transitive" | "possession":
            return clause._replace(direct=_direct_object(rng, clause, style, pronouns=0.25))
        case "ditransitive":
            return _with_two_objects(rng, clause, style)
        case "copula":
            return _with_adjective(rng, clause)
        case "price":
            price = with_number(sample_number(rng, 999), "{} euros", "{} Euro")
            return clause._replace(complement=price)
        case "age":
            number = sample_number(rng, 99 if _subject_kind(clause) == "person" else 999)
            age = with_number(number, "{} years old", "{} Jahre alt")
            return clause._replace(complement=age)
    return clause._replace(adjunct=_adjunct(rng, clause, style))


def _direct_object(rng: Rng, clause: Clause, style: Style, pronouns: float) -> NounPhrase | Pronoun:
    determiners = "negated" if clause.negated else "object"
    if clause.negated and clause.verb.case == Case.DATIVE:
        determiners = "definite"
    return sample_other(rng, clause, clause.verb.objects, style, determiners, pronouns)


def _with_two_objects(rng: Rng, clause: Clause, style: Style) -> Clause:
    determiners = "definite" if clause.negated else "oblique"
    indirect = sample_other(rng, clause, ("person",), style, determiners, 0.45)
    # German puts two pronouns in another order than two nouns; the grammar does without them.
    direct = _direct_object(rng, clause, style, pronouns=0.0)
    is_her = isinstance(indirect, Pronoun) and indirect.english_object == "her"
    if is_her and isinstance(direct, NounPhrase) and not direct.determiner:
        # "Shows her pictures" has two meanings.
        direct = direct._replace(determiner="the", number=0)
    return clause._replace(indirect=indirect, direct=direct)


def _with_adjective(rng: Rng, clause: Clause) -> Clause:
    subject = clause.subject
    adjective = pick(rng, adjectives_of(_subject_kind(clause)))
    if isinstance(subject, NounPhrase) and subject.adjective == adjective:
        subject = subject._replace(adjective=None)
    return clause._replace(subject=subject, complement=adjective)


def _subject_kind(clause: Clause) -> str:
    subject = clause.subject
    if isinstance(subject, Pronoun):
        return "person"
    return (subject if isinstance(subject, NounPhrase) else subject.first).noun.kind


def _adjunct(rng: Rng, clause: Clause, style: Style) -> Adjunct | FixedPhrase | None:
    verb = clause.verb
    kinds: Kinds = lex.PLACES
    pronouns, preposition = 0.0, None
    if verb.frame == "prepositional":
        preposition = Preposition(verb.preposition, verb.german_preposition, verb.case)
        kinds, pronouns = verb.objects, 0.3
    elif verb.frame == "motion":
        preposition = pick(rng, DIRECTIONS)
        if preposition.english == "to":
            kinds, pronouns = ("person",) if rng.random() < 0.5 else ("building",), 0.3
    elif verb.english == "live" and rng.random() < 0.2:
        number = sample_number(rng, 999, is_count=False)
        return with_number(number, "in room {}", "in Zimmer {}")
    elif verb.frame == "intransitive" or (verb.frame == "activity" and rng.random() >= 0.75):
        return None
    # "Sleep with" has a second meaning in both languages.
    elif verb.frame == "location" or rng.random() < 0.6 or verb.english == "sleep":
        preposition = pick(rng, LOCATIONS)
    else:
        kinds, pronouns = ("person",), 0.4
    phrase = sample_other(rng, clause, kinds, style, "oblique", pronouns)
    return Adjunct(preposition or pick(rng, COMPANY), phrase)
