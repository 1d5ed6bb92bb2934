"""German sentences read off the same derivations as the English ones."""

from typing import NamedTuple

from experiments.translation.grammar.lexicon import (
    ACCUSATIVE,
    DATIVE,
    MODALS,
    NOMINATIVE,
    POSSESSIVES,
    QUESTION_WORDS,
    Noun,
    Pronoun,
    Verb,
)
from experiments.translation.grammar.numerals import german_number
from experiments.translation.grammar.trees import (
    Adjunct,
    Clause,
    Coordination,
    Nominal,
    NounPhrase,
    Relative,
    Sentence,
)
from experiments.translation.grammar.writing import phrase, written

# Each row: nominative, accusative, dative. The last row is the plural of all genders.
ARTICLE = {
    "m": ("der", "den", "dem"),
    "f": ("die", "die", "der"),
    "n": ("das", "das", "dem"),
    "p": ("die", "die", "den"),
}
STRONG = {
    "m": ("er", "en", "em"),
    "f": ("e", "e", "er"),
    "n": ("es", "es", "em"),
    "p": ("e", "e", "en"),
}
AFTER_EIN = {
    "m": ("er", "en", "en"),
    "f": ("e", "e", "en"),
    "n": ("es", "es", "en"),
    "p": ("en", "en", "en"),
}
AFTER_DER = {
    "m": ("e", "en", "en"),
    "f": ("e", "e", "en"),
    "n": ("e", "e", "en"),
    "p": ("en", "en", "en"),
}
BARE_EIN = (("m", NOMINATIVE), ("n", NOMINATIVE), ("n", ACCUSATIVE))
EIN_WORDS = {"a": "ein", "no": "kein", **POSSESSIVES}
DER_WORDS = {"this": "dies", "every": "jed"}
CONTRACTIONS = {
    "in dem": "im",
    "in das": "ins",
    "zu dem": "zum",
    "zu der": "zur",
    "von dem": "vom",
}
IRREGULAR_PRESENT = {
    "sein": ("bin", "bist", "ist", "sind", "sind"),
    "haben": ("habe", "hast", "hat", "haben", "haben"),
    "wissen": ("weiß", "weißt", "weiß", "wissen", "wissen"),
}
PRETERITE = {
    "sein": ("war", "warst", "war", "waren", "waren"),
    "haben": ("hatte", "hattest", "hatte", "hatten", "hatten"),
    "wissen": ("wusste", "wusstest", "wusste", "wussten", "wussten"),
}


class VerbComplex(NamedTuple):
    """The finite verb, and what closes the clause: a prefix, or a participle or infinitive."""

    finite: str
    closing: str
    is_prefix: bool


def german_sentence(sentence: Sentence) -> str:
    """Return the German sentence, with its capital letter and its full stop or question mark."""
    if sentence.question:
        words, end = _question(sentence), "?"
    else:
        words, end = _statement(sentence), "."
    return written(words, end)


def _question(sentence: Sentence) -> list[str]:
    return [QUESTION_WORDS.get(sentence.question, ""), *_verb_before_subject(sentence.main, "")]


def _statement(sentence: Sentence) -> list[str]:
    main, link, second = sentence.main, sentence.link, sentence.second
    if link is None or second is None:
        return _main_clause(main, sentence.front, sentence.relative)
    linked = _verb_final(second) if link.subordinating else _main_clause(second)
    linked = [link.german, *linked]
    if sentence.front == "second":
        return [_comma(linked), *_verb_before_subject(main, "")]
    first = _main_clause(main)
    return [_comma(first), *linked] if link.german_comma else [*first, *linked]


def _comma(words: list[str]) -> str:
    return phrase(words) + ","


def _main_clause(clause: Clause, front: str = "", relative: Relative | None = None) -> list[str]:
    if front == "time" and clause.time:
        return [clause.time.german, *_verb_before_subject(clause, front)]
    if front == "adjunct":
        return [_adjunct(clause), *_verb_before_subject(clause, front)]
    subject = nominal(clause.subject, NOMINATIVE)
    if relative is not None:
        subject = _comma([_comma([subject]), *_relative(relative)])
    verb = verb_complex(clause)
    return [subject, verb.finite, *_middle(clause, front), verb.closing]


def _verb_before_subject(clause: Clause, front: str) -> list[str]:
    verb = verb_complex(clause)
    subject = nominal(clause.subject, NOMINATIVE)
    return [verb.finite, subject, *_middle(clause, front), verb.closing]


def _verb_final(clause: Clause) -> list[str]:
    return [nominal(clause.subject, NOMINATIVE), *_without_subject(clause)]


def _without_subject(clause: Clause) -> list[str]:
    verb = verb_complex(clause)
    middle = _middle(clause, "")
    if verb.is_prefix:
        return [*middle, verb.closing + verb.finite]
    return [*middle, verb.closing, verb.finite]


def _relative(relative: Relative) -> list[str]:
    clause, gap = relative
    antecedent = clause.subject if gap == "subject" else clause.direct
    case = NOMINATIVE if gap == "subject" else clause.verb.case
    pronoun = _relative_pronoun(antecedent, case)
    if gap == "subject":
        return [pronoun, *_without_subject(clause)]
    return [pronoun, *_verb_final(clause._replace(direct=None))]


def _relative_pronoun(antecedent: Nominal | None, case: int) -> str:
    if not isinstance(antecedent, NounPhrase) or antecedent.plural:
        return "denen" if case == DATIVE else "die"
    return ARTICLE[antecedent.noun.gender][case]


def _middle(clause: Clause, front: str) -> list[str]:
    """Return what stands between the two ends of the verb, in the order that sounds unmarked."""
    time = "" if front == "time" or clause.time is None else clause.time.german
    adjunct = "" if front == "adjunct" else _adjunct(clause)
    complement = clause.complement.german if clause.complement else ""
    indirect = nominal(clause.indirect, DATIVE) if clause.indirect else ""
    no_object = clause.negated and _is_indefinite(clause.direct)
    direct = ""
    if clause.direct:
        direct = nominal(clause.direct, clause.verb.case, no_object=no_object)
    if clause.negated and not no_object:
        objects = [indirect, direct, time, "nicht"]
    elif isinstance(clause.direct, Pronoun):
        objects = [direct, time]
    else:
        objects = [indirect, time, direct]
    return [*objects, adjunct, complement]


def _is_indefinite(phrase: NounPhrase | Pronoun | None) -> bool:
    return isinstance(phrase, NounPhrase) and phrase.determiner in ("", "a")


def _adjunct(clause: Clause) -> str:
    adjunct = clause.adjunct
    if not isinstance(adjunct, Adjunct):
        return adjunct.german if adjunct else ""
    phrase = nominal(adjunct.phrase, adjunct.preposition.case)
    article, _, rest = phrase.partition(" ")
    if isinstance(adjunct.phrase, NounPhrase):
        contracted = CONTRACTIONS.get(f"{adjunct.preposition.german} {article}")
        if contracted:
            return f"{contracted} {rest}"
    return f"{adjunct.preposition.german} {phrase}"


def verb_complex(clause: Clause) -> VerbComplex:
    """Return the finite verb of a clause in agreement with its subject, and its closing part."""
    verb, tense, person = clause.verb, clause.tense, clause.subject.person
    if tense in MODALS:
        return VerbComplex(MODALS[tense].german[person], verb.prefix + verb.german, False)
    if tense == "past" and verb.german in PRETERITE:
        return VerbComplex(PRETERITE[verb.german][person], "", False)
    if tense in ("past", "perfect"):
        finite = IRREGULAR_PRESENT[verb.auxiliary][person]
        return VerbComplex(finite, verb.german_participle, False)
    return VerbComplex(present(verb, person), verb.prefix, bool(verb.prefix))


def present(verb: Verb, person: int) -> str:
    """Return a present form without its prefix; `person` counts ich, du, er, wir, sie from 0."""
    if verb.german in IRREGULAR_PRESENT:
        return IRREGULAR_PRESENT[verb.german][person]
    stem = verb.german[:-2]
    if person == 0:
        return stem + "e"
    if person > 2:
        return verb.german
    link = "e" if stem[-1] in "dt" and not verb.changed else ""
    stem = verb.changed or stem
    if person == 1 and stem[-1] not in "sßz":
        return stem + link + "st"
    return stem + link + "t"


def nominal(phrase: Nominal, case: int, *, no_object: bool = False) -> str:
    """Return a pronoun, a noun phrase, or two of these joined by "und", in a case.

    With `no_object` an indefinite phrase is denied: "ein Hund" becomes "kein Hund".
    """
    if isinstance(phrase, Pronoun):
        return phrase.german[case]
    if isinstance(phrase, Coordination):
        return f"{nominal(phrase.first, case)} und {nominal(phrase.second, case)}"
    gender = "p" if phrase.plural else phrase.noun.gender
    determiner, endings = _determiner(phrase, gender, case, no_object=no_object)
    words = [determiner] if determiner else []
    if phrase.adjective:
        stem = phrase.adjective.stem or phrase.adjective.german
        words.append(stem + endings[gender][case])
    words.append(noun_form(phrase.noun, plural=phrase.plural, case=case))
    return " ".join(words)


def _determiner(
    phrase: NounPhrase, gender: str, case: int, *, no_object: bool
) -> tuple[str, dict[str, tuple[str, str, str]]]:
    """Return the word before the adjective, and the adjective endings that it asks for."""
    name = "no" if no_object else phrase.determiner
    if phrase.count:
        return german_number(phrase.count), STRONG
    if name == "the":
        return ARTICLE[gender][case], AFTER_DER
    if name in DER_WORDS:
        return DER_WORDS[name] + STRONG[gender][case], AFTER_DER
    if name in EIN_WORDS:
        ending = "" if (gender, case) in BARE_EIN else STRONG[gender][case]
        return EIN_WORDS[name] + ending, AFTER_EIN
    return "", STRONG


def noun_form(noun: Noun, *, plural: bool, case: int) -> str:
    """Return a noun in a case: "dem Jungen", "den Kindern"."""
    if not plural:
        return noun.german_plural if noun.weak and case != NOMINATIVE else noun.german
    if case == DATIVE and noun.german_plural[-1] not in "ns":
        return noun.german_plural + "n"
    return noun.german_plural
