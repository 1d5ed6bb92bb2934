"""English sentences read off a derivation."""

from experiments.translation.grammar.lexicon import BE, MODALS, Pronoun, Verb
from experiments.translation.grammar.numerals import english_number
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

BE_FORMS = {
    "present": ("am", "are", "is", "are", "are"),
    "past": ("was", "were", "was", "were", "were"),
}
PLURAL_DETERMINERS = {"this": "these"}


def english_sentence(sentence: Sentence) -> str:
    """Return the English sentence, with its capital letter and its full stop or question mark."""
    if sentence.question:
        words, end = _question(sentence), "?"
    else:
        words, end = _statement(sentence), "."
    return written(words, end)


def third_person(base: str) -> str:
    """Return the form of an English verb after he or she, for "carry" "carries"."""
    if base == "have":
        return "has"
    if base.endswith(("s", "sh", "ch", "x", "o")):
        return base + "es"
    if base[-1] == "y" and base[-2] not in "aeiou":
        return base[:-1] + "ies"
    return base + "s"


def _statement(sentence: Sentence) -> list[str]:
    main, link, second = sentence.main, sentence.link, sentence.second
    if link is None or second is None:
        return _clause(main, sentence.front, sentence.relative)
    if sentence.front == "second":
        return [_comma([link.english, *_clause(second)]), *_clause(main)]
    first = _clause(main)
    if link.english_comma:
        first = [_comma(first)]
    return [*first, link.english, *_clause(second)]


def _comma(words: list[str]) -> str:
    return phrase(words) + ","


def _clause(clause: Clause, front: str = "", relative: Relative | None = None) -> list[str]:
    fronted = {"time": _time(clause), "adjunct": _adjunct(clause)}.get(front, "")
    auxiliary, verb = verb_group(clause, question=False)
    return [
        fronted,
        nominal(clause.subject, is_subject=True),
        _relative(relative),
        auxiliary,
        verb,
        *_after_verb(clause, front),
    ]


def _question(sentence: Sentence) -> list[str]:
    clause = sentence.main
    auxiliary, verb = verb_group(clause, question=True)
    asked = "" if sentence.question == "yes" else sentence.question
    subject = nominal(clause.subject, is_subject=True)
    return [asked, auxiliary, subject, verb, *_after_verb(clause, "")]


def _relative(relative: Relative | None) -> str:
    if relative is None:
        return ""
    clause, gap = relative
    antecedent = clause.subject if gap == "subject" else clause.direct
    is_person = isinstance(antecedent, NounPhrase) and antecedent.noun.kind == "person"
    words = ["who" if is_person and gap == "subject" else "that"]
    if gap == "direct":
        words.append(nominal(clause.subject, is_subject=True))
        clause = clause._replace(direct=None)
    words += [*verb_group(clause, question=False), *_after_verb(clause, "")]
    return phrase(words)


def _after_verb(clause: Clause, front: str) -> list[str]:
    verb = clause.verb
    return [
        nominal(clause.indirect) if clause.indirect else "",
        verb.english_preposition,
        nominal(clause.direct) if clause.direct else "",
        verb.particle,
        clause.complement.english if clause.complement else "",
        "" if front == "adjunct" else _adjunct(clause),
        "" if front == "time" else _time(clause),
    ]


def _time(clause: Clause) -> str:
    return clause.time.english if clause.time else ""


def _adjunct(clause: Clause) -> str:
    adjunct = clause.adjunct
    if isinstance(adjunct, Adjunct):
        return f"{adjunct.preposition.english} {nominal(adjunct.phrase)}"
    return adjunct.english if adjunct else ""


def verb_group(clause: Clause, *, question: bool) -> tuple[str, str]:
    """Return the part that changes places with the subject in a question, and the rest."""
    verb, tense, person = clause.verb, clause.tense, clause.subject.person
    negation = "not" if clause.negated else ""
    if tense in MODALS:
        return _modal_group(clause, question=question)
    if verb is BE:
        return BE_FORMS[tense][person], negation
    if tense == "perfect":
        has = "has" if person == 2 else "have"
        return has, f"{negation} {verb.english_participle}".strip()
    if question or clause.negated:
        return _support("did" if tense == "past" else "do", person), _base(negation, verb)
    if tense == "past":
        return "", verb.english_past
    return "", third_person(verb.english) if person == 2 else verb.english


def _modal_group(clause: Clause, *, question: bool) -> tuple[str, str]:
    modal, person = MODALS[clause.tense], clause.subject.person
    negation = "not" if clause.negated else ""
    if modal.support and (clause.negated or (question and not modal.support_only_if_negated)):
        verb = f"{modal.base} {clause.verb.english}"
        return _support(modal.support, person), f"{negation} {verb}".strip()
    form = modal.english_third if person == 2 else modal.english
    if form == "can" and clause.negated:
        return "cannot", clause.verb.english
    return form, _base(negation, clause.verb)


def _base(negation: str, verb: Verb) -> str:
    return f"{negation} {verb.english}".strip()


def _support(do: str, person: int) -> str:
    return "does" if do == "do" and person == 2 else do


def nominal(phrase: Nominal, *, is_subject: bool = False) -> str:
    """Return a pronoun, a noun phrase, or two of these joined by "and"."""
    if isinstance(phrase, Pronoun):
        return phrase.english if is_subject else phrase.english_object
    if isinstance(phrase, Coordination):
        return f"{nominal(phrase.first)} and {nominal(phrase.second)}"
    words = [phrase.noun.english_plural if phrase.plural else phrase.noun.english]
    if phrase.adjective:
        words.insert(0, phrase.adjective.english)
    if phrase.count:
        words.insert(0, english_number(phrase.count))
    elif phrase.determiner == "a":
        words.insert(0, "an" if words[0][0] in "aeiou" else "a")
    elif phrase.determiner:
        determiner = phrase.determiner
        words.insert(
            0, PLURAL_DETERMINERS.get(determiner, determiner) if phrase.plural else determiner
        )
    return " ".join(words)
