"""English sentences, realized from derivations."""

from experiments.translation.grammar import lexicon as lex
from experiments.translation.grammar.derivation import (
    Adjunct,
    Clause,
    Constituent,
    Coordination,
    Nominal,
    NounPhrase,
    Sentence,
)


def english_sentence(sentence: Sentence) -> str:
    """The English text of a derivation."""
    main, conjunction, second = sentence.main, sentence.conjunction, sentence.second
    subject = _subject(main)
    if sentence.relative:
        is_object = sentence.relative_is_object
        subject += " " + _relative_clause(sentence.relative, main.subject, is_object=is_object)
    if sentence.question:
        question_word = _phrase(lex.QUESTION_WORDS.get(sentence.question))
        auxiliary, verb = _verb_group(main, is_question=True)
        words = f"{question_word} {auxiliary} {subject} {verb} {_after_verb(main)}"
    elif conjunction is None or second is None:
        words = f"{_phrase(sentence.fronted)} {_clause(main, subject)}"
    else:
        linked = f"{conjunction.english} {_clause(second, _subject(second))}"
        comma = "," if conjunction.english_comma else ""
        first = _clause(main, subject)
        words = f"{linked}, {first}" if sentence.second_first else f"{first}{comma} {linked}"
    return sentence.punctuate(words)


def _subject(clause: Clause) -> str:
    return _phrase(clause.subject, is_subject=True)


def _clause(clause: Clause, subject: str) -> str:
    return " ".join((subject, *_verb_group(clause), _after_verb(clause)))


def _relative_clause(clause: Clause, antecedent: Nominal, *, is_object: bool) -> str:
    if is_object:
        return _clause(clause, f"that {_subject(clause)}")
    is_person = isinstance(antecedent, NounPhrase) and antecedent.noun.kind == "person"
    return _clause(clause, "who" if is_person else "that")


def _after_verb(clause: Clause) -> str:
    verb = clause.verb
    preposition = "" if verb.german_preposition else verb.preposition
    words = [_phrase(clause.indirect), preposition, _phrase(clause.direct), verb.particle]
    words += map(_phrase, (clause.complement, clause.adjunct, clause.time))
    return " ".join(words)


def _verb_group(clause: Clause, *, is_question: bool = False) -> tuple[str, str]:
    """The auxiliary, which a question puts before the subject, and the other words."""
    verb, tense, person = clause.verb, clause.tense, clause.subject.person
    negation = "not " if clause.negated else ""
    if modal := lex.MODALS.get(tense):
        if modal.infinitive and (clause.negated or (is_question and not modal.only_negated)):
            auxiliary = "did" if modal.past else present("do", person)
            return auxiliary, f"{negation}{modal.infinitive} {verb.english}"
        if modal.english == "can" and clause.negated:
            return "cannot", verb.english
        form = modal.english_third if person == lex.THIRD_SINGULAR else modal.english
        return form, negation + verb.english
    if verb.english == "be":
        return lex.IRREGULAR["be", tense][person], negation
    if tense == "perfect":
        return present("have", person), negation + verb.participle
    if is_question or clause.negated:
        auxiliary = "did" if tense == "past" else present("do", person)
        return auxiliary, negation + verb.english
    return "", verb.past if tense == "past" else present(verb.english, person)


def present(verb: str, person: int) -> str:
    """A present form of a verb: "carries" of "carry" in the third person singular."""
    if person != lex.THIRD_SINGULAR:
        return verb
    if verb == "have":
        return "has"
    if verb.endswith(("s", "sh", "ch", "x", "o")):
        return verb + "es"
    if verb[-1] == "y" and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


def _phrase(phrase: Constituent | None, *, is_subject: bool = False) -> str:
    match phrase:
        case None:
            return ""
        case lex.Pronoun():
            return phrase.english if is_subject else phrase.english_object
        case Coordination():
            return f"{_phrase(phrase.first)} and {_phrase(phrase.second)}"
        case Adjunct():
            return f"{phrase.preposition.english} {_phrase(phrase.phrase)}"
        case NounPhrase():
            return _noun_phrase(phrase)
    return phrase.english


def _noun_phrase(phrase: NounPhrase) -> str:
    words = phrase.noun.english_plural if phrase.plural else phrase.noun.english
    if phrase.adjective:
        words = f"{phrase.adjective.english} {words}"
    determiner = phrase.determiner
    if phrase.number:
        determiner = english_number(phrase.number)
    elif determiner == "a" and words[0] in "aeiou":
        determiner = "an"
    elif determiner == "this" and phrase.plural:
        determiner = "these"
    return f"{determiner} {words}"


def english_number(number: int) -> str:
    """The words of a number from 0 to 999: "three hundred forty-two" for 342."""
    hundreds, remainder = lex.split_hundreds(number)
    if hundreds:
        words = f"{lex.NUMERALS[hundreds].english} hundred"
        return f"{words} {english_number(remainder)}" if remainder else words
    if remainder in lex.NUMERALS:
        return lex.NUMERALS[remainder].english
    return (
        f"{lex.NUMERALS[remainder - remainder % 10].english}-{lex.NUMERALS[remainder % 10].english}"
    )
