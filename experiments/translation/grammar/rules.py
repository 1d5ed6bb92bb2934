"""The rules of the grammar, each a random choice of what a derivation is made of."""

from functools import cache

import numpy as np

from experiments.translation.grammar import lexicon as lex
from experiments.translation.grammar.lexicon import Link, Pronoun, Verb
from experiments.translation.grammar.numerals import english_number, german_number
from experiments.translation.grammar.phrases import (
    ANTECEDENT,
    BESIDE,
    DEFINITE,
    DENIED,
    OBJECT,
    SUBJECT,
    Style,
    adjectives_of,
    pick,
    some_noun_phrase,
    some_number,
    some_subject,
    some_time,
    some_time_of_a_state,
    somebody_else,
    weighted,
)
from experiments.translation.grammar.trees import (
    Adjunct,
    Clause,
    Coordination,
    Invariable,
    NounPhrase,
    Relative,
    Sentence,
)

NOW = ("present",) * 6 + ("can", "must", "want", "should", "may", "will")
THEN = ("past",) * 4 + ("perfect",) * 3 + ("could", "had", "wanted")
FULL = Style(NOW + THEN)
SHORT = Style(NOW + THEN, adjectives=0.2, times=0.15, coordinations=0.0)
TIMELESS = SHORT._replace(times=0.0)
TIMELESS_NOW = TIMELESS._replace(tenses=NOW)
CONDITION = TIMELESS._replace(tenses=("present",) * 6 + ("can", "must", "want", "may"))

FRAMES = (
    ("transitive", 34),
    ("giving", 13),
    ("resting", 12),
    ("moving", 11),
    ("rising", 9),
    ("governing", 9),
    ("being", 11),
    ("having", 4),
    ("dwelling", 5),
    ("cost", 4),
    ("age", 3),
)
# The few verbs of food and drink come twice, or their nouns would be rare.
DAILY_VERBS = tuple(verb for verb in lex.TRANSITIVE if set(verb.objects) & set(lex.MASS))
VERBS = {
    "transitive": lex.TRANSITIVE + DAILY_VERBS,
    "giving": lex.GIVING,
    "resting": lex.RESTING,
    "moving": lex.MOVING,
    "rising": lex.RISING,
    "governing": lex.GOVERNING,
    "being": (lex.BE,),
    "having": (lex.HAVE,),
    "dwelling": lex.DWELLING,
    "cost": (lex.COST,),
    "age": (lex.BE,),
}
# What a verb can be said in, where that is not everything.
FRAME_TENSES = {
    "being": ("present", "past"),
    "cost": ("present",),
    "age": ("present",),
    "having": ("present", "past", "can", "must", "want", "should", "may", "will", "wanted"),
}
KINDS = (
    ("plain", 36),
    ("relative", 8),
    ("reason", 10),
    ("condition", 9),
    ("report", 13),
    ("coordinated", 9),
    ("question", 10),
)
MEASURED_LIVING = 99


def sentence(rng: np.random.Generator) -> Sentence:
    """Return one derivation."""
    kind = weighted(rng, KINDS)
    if kind == "plain":
        return _plain(rng)
    if kind == "relative":
        return _with_relative(rng)
    if kind == "question":
        return _question(rng)
    if kind == "report":
        return _report(rng)
    if kind == "reason":
        link = lex.BECAUSE if rng.random() < 0.65 else lex.ALTHOUGH
        return _two_clauses(rng, link, SHORT, TIMELESS)
    if kind == "condition":
        link = lex.WHEN if rng.random() < 0.5 else lex.IF
        return _two_clauses(rng, link, TIMELESS_NOW, CONDITION)
    link = lex.AND if rng.random() < 0.6 else lex.BUT
    return _two_clauses(rng, link, TIMELESS, TIMELESS)


def _plain(rng: np.random.Generator) -> Sentence:
    main = clause(rng, FULL)
    if main.time and rng.random() < 0.4:
        return Sentence(main, front="time")
    if main.verb in lex.RESTING and isinstance(main.adjunct, Adjunct):
        is_place = main.adjunct.preposition in lex.STATIC and not main.negated
        if is_place and rng.random() < 0.35:
            return Sentence(main, front="adjunct")
    return Sentence(main)


def _two_clauses(rng: np.random.Generator, link: Link, first: Style, second: Style) -> Sentence:
    front = "second" if link.subordinating and rng.random() < 0.4 else ""
    return Sentence(clause(rng, first), front=front, link=link, second=clause(rng, second))


def _report(rng: np.random.Generator) -> Sentence:
    asking = rng.random() < 0.25
    verb = lex.ASK if asking else pick(rng, lex.REPORTING)
    doubting = verb is lex.KNOW and rng.random() < 0.5
    main = Clause(
        some_subject(rng, verb.subjects, SHORT, DEFINITE if doubting else SUBJECT),
        verb,
        tense="past" if rng.random() < 0.35 else "present",
        negated=doubting,
    )
    link = lex.WHETHER if asking or doubting else lex.THAT
    return Sentence(main, link=link, second=clause(rng, SHORT))


def _question(rng: np.random.Generator) -> Sentence:
    asked = pick(rng, ("yes", "yes", "yes", "why", "when", "where"))
    if asked == "where":
        verb = pick(rng, lex.RESTING + lex.DWELLING)
        subject = some_subject(rng, verb.subjects, SHORT, DEFINITE)
        return Sentence(Clause(subject, verb, pick(rng, SHORT.tenses)), question="where")
    style = TIMELESS if asked == "when" else SHORT
    main = clause(rng, style._replace(negations=0.0))
    while asked == "when" and main.verb in (lex.BE, lex.COST):
        main = clause(rng, style._replace(negations=0.0))
    return Sentence(main, question=asked)


def _with_relative(rng: np.random.Generator) -> Sentence:
    main = clause(rng, SHORT)
    while not isinstance(main.subject, NounPhrase):
        main = clause(rng, SHORT)
    kind = main.subject.noun.kind
    determiners = ANTECEDENT.plural if main.subject.plural else ANTECEDENT.singular
    phrase = main.subject._replace(determiner=pick(rng, determiners), count=0)
    main = main._replace(subject=phrase)
    if kind in lex.LIVING and rng.random() < 0.6:
        said = clause(rng, TIMELESS, phrase)
        return Sentence(main._replace(subject=said.subject), relative=Relative(said, "subject"))
    verb = pick(rng, _verbs_with_object(kind))
    subject = some_subject(rng, ("person",), TIMELESS, DEFINITE)
    said = Clause(subject, verb, pick(rng, TIMELESS.tenses), direct=phrase)
    return Sentence(main, relative=Relative(said, "direct"))


def clause(rng: np.random.Generator, style: Style, subject: NounPhrase | None = None) -> Clause:
    """Return a clause, about the given subject (a living one) if there is one."""
    frame = weighted(rng, FRAMES)
    if subject is not None:
        while frame == "cost" or not _verbs_of(frame, subject.noun.kind):
            frame = weighted(rng, FRAMES)
        verb = pick(rng, _verbs_of(frame, subject.noun.kind))
    else:
        verb = pick(rng, VERBS[frame])
    tense = pick(rng, style.tenses)
    if frame in FRAME_TENSES:
        tense = tense if tense in FRAME_TENSES[frame] else "present"
    negated = frame not in ("cost", "age") and rng.random() < style.negations
    who = subject or some_subject(rng, _subject_kinds(frame, verb), style, SUBJECT, negated)
    time = None
    if frame not in ("cost", "age") and rng.random() < style.times:
        is_state = frame == "being"
        time = some_time_of_a_state(rng, tense) if is_state else some_time(rng, tense, negated)
    made = Clause(who, verb, tense, negated, time=time)
    return _completed(rng, frame, made, style)


def _subject_kinds(frame: str, verb: Verb) -> tuple[str, ...]:
    return ("person", "building") if frame == "age" else verb.subjects


@cache
def _verbs_of(frame: str, kind: str) -> tuple[Verb, ...]:
    return tuple(verb for verb in VERBS[frame] if kind in _subject_kinds(frame, verb))


@cache
def _verbs_with_object(kind: str) -> tuple[Verb, ...]:
    return tuple(
        verb
        for verb in lex.TRANSITIVE
        if kind in verb.objects and not verb.particle and not verb.english_preposition
    )


def _completed(rng: np.random.Generator, frame: str, made: Clause, style: Style) -> Clause:
    """Return the clause with the objects, adjuncts and complements that its frame asks for."""
    if frame in ("transitive", "having"):
        return made._replace(direct=_object(rng, made, style))
    if frame == "giving":
        determiners = DEFINITE if made.negated else BESIDE
        receiver = somebody_else(rng, made, ("person",), style, determiners, 0.45)
        return _unmistakable(made._replace(indirect=receiver, direct=_object(rng, made, style)))
    if frame == "being":
        return _described(rng, made)
    if frame == "cost":
        number = some_number(rng, 999, True)
        price = Invariable(f"{english_number(number)} euros", f"{german_number(number)} Euro")
        return made._replace(complement=price)
    if frame == "age":
        is_person = isinstance(made.subject, Pronoun) or _kind(made.subject) == "person"
        number = some_number(rng, MEASURED_LIVING if is_person else 999, True)
        age = f"{english_number(number)} years old", f"{german_number(number)} Jahre alt"
        return made._replace(complement=Invariable(*age))
    return made._replace(adjunct=_adjunct(rng, frame, made, style))


def _adjunct(
    rng: np.random.Generator, frame: str, made: Clause, style: Style
) -> Adjunct | Invariable | None:
    if frame == "governing" and made.verb.governs:
        phrase = somebody_else(rng, made, made.verb.objects, style, BESIDE, 0.3)
        return Adjunct(made.verb.governs, phrase)
    if frame == "moving":
        preposition = pick(rng, (lex.INTO, lex.INTO, lex.OUT_OF, lex.TO, lex.TO))
        if preposition is not lex.TO:
            return Adjunct(preposition, some_noun_phrase(rng, lex.PLACES, style, BESIDE))
        kinds = ("person",) if rng.random() < 0.5 else ("building",)
        return Adjunct(preposition, somebody_else(rng, made, kinds, style, BESIDE, 0.3))
    if frame == "dwelling":
        if made.verb.english == "live" and rng.random() < 0.2:
            number = some_number(rng, 999, False)
            return Invariable(
                f"in room {english_number(number)}", f"in Zimmer {german_number(number)}"
            )
        return Adjunct(pick(rng, lex.STATIC), some_noun_phrase(rng, lex.PLACES, style, BESIDE))
    if frame == "resting" and rng.random() < 0.75:
        # "Slept with" means something else, in both languages.
        if rng.random() < 0.6 or made.verb.english == "sleep":
            return Adjunct(pick(rng, lex.STATIC), some_noun_phrase(rng, lex.PLACES, style, BESIDE))
        phrase = somebody_else(rng, made, ("person",), style, BESIDE, 0.4)
        return Adjunct(pick(rng, lex.COMPANY), phrase)
    return None


def _unmistakable(made: Clause) -> Clause:
    """Return the clause without "shows her pictures", which could mean ihr or ihre."""
    indirect, direct = made.indirect, made.direct
    if isinstance(indirect, Pronoun) and indirect.english_object == "her":
        if isinstance(direct, NounPhrase) and not direct.determiner:
            return made._replace(direct=direct._replace(determiner="the", count=0))
    return made


def _described(rng: np.random.Generator, made: Clause) -> Clause:
    subject = made.subject
    kind = "person" if isinstance(subject, Pronoun) else _kind(subject)
    quality = pick(rng, adjectives_of(kind))
    if isinstance(subject, NounPhrase) and subject.adjective is quality:
        made = made._replace(subject=subject._replace(adjective=None))
    return made._replace(complement=Invariable(quality.english, quality.german))


def _kind(subject: NounPhrase | Coordination) -> str:
    return (subject.first if isinstance(subject, Coordination) else subject).noun.kind


def _object(rng: np.random.Generator, made: Clause, style: Style) -> NounPhrase | Pronoun:
    determiners = DENIED if made.negated else OBJECT
    if made.negated and made.verb.case == lex.DATIVE:
        determiners = DEFINITE
    # German orders two pronouns otherwise than two nouns; the grammar leaves that out.
    share = 0.0 if made.verb in lex.GIVING else 0.25
    return somebody_else(rng, made, made.verb.objects, style, determiners, share)
