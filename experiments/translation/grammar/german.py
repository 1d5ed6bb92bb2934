"""German sentences, realized from the same derivations as the English ones."""

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

Paradigm = dict[str, list[str]]


def _paradigm(**forms: str) -> Paradigm:
    return {gender: cases.replace("-", "").split(" ") for gender, cases in forms.items()}


# The forms of each gender in the nominative, accusative and dative; "p" is the plural.
ARTICLE = _paradigm(m="der den dem", f="die die der", n="das das dem", p="die die den")
EIN = _paradigm(m="- en em", f="e e er", n="- - em", p="e e en")
STRONG = _paradigm(m="er en em", f="e e er", n="es es em", p="e e en")
MIXED = _paradigm(m="er en en", f="e e en", n="es es en", p="en en en")
WEAK = _paradigm(m="e en en", f="e e en", n="e e en", p="en en en")
# The stem of a determiner, its endings, and the endings of the adjective after it.
DETERMINERS = {
    "the": ("", ARTICLE, WEAK),
    "this": ("dies", STRONG, WEAK),
    "every": ("jed", STRONG, WEAK),
    "a": ("ein", EIN, MIXED),
    "no": ("kein", EIN, MIXED),
} | {english: (entry.german, EIN, MIXED) for english, entry in lex.POSSESSIVES.items()}
CONTRACTIONS = {"in dem": "im", "in das": "ins", "zu dem": "zum", "zu der": "zur", "von dem": "vom"}


def german_sentence(sentence: Sentence) -> str:
    """The German text of a derivation."""
    main, conjunction, second = sentence.main, sentence.conjunction, sentence.second
    subject = _phrase(main.subject)
    if sentence.relative:
        is_object = sentence.relative_is_object
        subject += f", {_relative_clause(sentence.relative, main.subject, is_object=is_object)},"
    if sentence.question:
        question_word = _phrase(lex.QUESTION_WORDS.get(sentence.question))
        words = f"{question_word} {_clause(main, subject, verb='first')}"
    elif sentence.fronted:
        words = f"{_phrase(sentence.fronted)} {_clause(main, subject, verb='first')}"
    elif conjunction is None or second is None:
        words = _clause(main, subject, verb="second")
    else:
        verb = "last" if conjunction.subordinating else "second"
        linked = f"{conjunction.german} {_clause(second, _phrase(second.subject), verb)}"
        comma = "," if conjunction.german_comma else ""
        if sentence.second_first:
            words = f"{linked}{comma} {_clause(main, subject, verb='first')}"
        else:
            words = f"{_clause(main, subject, verb='second')}{comma} {linked}"
    return sentence.punctuate(words)


def _clause(clause: Clause, subject: str, verb: str) -> str:
    """A clause whose finite verb comes first, second or last."""
    finite, closing = _verb_group(clause)
    middle = _middle_field(clause)
    if verb == "first":
        return f"{finite} {subject} {middle} {closing}"
    if verb == "second":
        return f"{subject} {finite} {middle} {closing}"
    space = "" if closing == clause.verb.prefix else " "
    return f"{subject} {middle} {closing}{space}{finite}"


def _relative_clause(clause: Clause, antecedent: Nominal, *, is_object: bool) -> str:
    case = clause.verb.case if is_object else lex.Case.NOMINATIVE
    if isinstance(antecedent, NounPhrase) and not antecedent.plural:
        pronoun = ARTICLE[antecedent.noun.gender][case]
    else:
        pronoun = "denen" if case == lex.Case.DATIVE else "die"
    subject = _phrase(clause.subject) if is_object else ""
    return _clause(clause, f"{pronoun} {subject}", verb="last")


def _middle_field(clause: Clause) -> str:
    """The words between the finite verb and the closing part, in their neutral order."""
    direct, negation = clause.direct, "nicht" if clause.negated else ""
    if clause.negated and isinstance(direct, NounPhrase) and direct.determiner in ("", "a"):
        direct, negation = direct._replace(determiner="no"), ""
    indirect, time = _phrase(clause.indirect, lex.Case.DATIVE), _phrase(clause.time)
    is_early = negation or isinstance(direct, lex.Pronoun)
    words = _phrase(direct, clause.verb.case)
    words = f"{words} {time}" if is_early else f"{time} {words}"
    return f"{indirect} {words} {negation} {_phrase(clause.adjunct)} {_phrase(clause.complement)}"


def _verb_group(clause: Clause) -> tuple[str, str]:
    """The finite verb, and the infinitive, participle or prefix that closes the clause."""
    verb, tense, person = clause.verb, clause.tense, clause.subject.person
    if modal := lex.MODALS.get(tense):
        return modal.german[person], verb.prefix + verb.german
    if tense == "present":
        return present(verb, person), verb.prefix
    if tense == "past" and (verb.german, "past") in lex.IRREGULAR:
        return lex.IRREGULAR[verb.german, "past"][person], ""
    # All other verbs use the perfect for the past, as spoken German does.
    auxiliary, participle = verb.perfect
    infinitive = "sein" if auxiliary == "ist" else "haben"
    return lex.IRREGULAR[infinitive, "present"][person], participle


def present(verb: lex.Verb, person: int) -> str:
    """A present form without its prefix; `person` counts ich, du, er, wir, sie from 0."""
    if (verb.german, "present") in lex.IRREGULAR:
        return lex.IRREGULAR[verb.german, "present"][person]
    stem = verb.german[:-2]
    if person == 0:
        return stem + "e"
    if person > lex.THIRD_SINGULAR:
        return verb.german
    link = "e" if stem[-1] in "dt" and not verb.stem else ""
    stem = verb.stem or stem
    ending = "st" if person == 1 and stem[-1] not in "sßz" else "t"
    return stem + link + ending


def _phrase(phrase: Constituent | None, case: lex.Case = lex.Case.NOMINATIVE) -> str:
    match phrase:
        case None:
            return ""
        case lex.Pronoun():
            return phrase.german[case]
        case Coordination():
            return f"{_phrase(phrase.first, case)} und {_phrase(phrase.second, case)}"
        case Adjunct(preposition, inner):
            article, _, rest = _phrase(inner, preposition.case).partition(" ")
            start = f"{preposition.german} {article}"
            return f"{CONTRACTIONS.get(start, start)} {rest}"
        case NounPhrase():
            return _noun_phrase(phrase, case)
    return phrase.german


def _noun_phrase(phrase: NounPhrase, case: lex.Case) -> str:
    gender = "p" if phrase.plural else phrase.noun.gender
    determiner, adjective, adjective_endings = "", "", STRONG
    if phrase.number:
        determiner = german_number(phrase.number)
    elif phrase.determiner:
        stem, endings, adjective_endings = DETERMINERS[phrase.determiner]
        determiner = stem + endings[gender][case]
    if phrase.adjective:
        stem = phrase.adjective.stem or phrase.adjective.german
        adjective = stem + adjective_endings[gender][case]
    return f"{determiner} {adjective} {noun_form(phrase.noun, plural=phrase.plural, case=case)}"


def noun_form(noun: lex.Noun, *, plural: bool, case: lex.Case) -> str:
    """A noun in a case: "Jungen", "Kindern"."""
    if not plural:
        return noun.german_plural if noun.weak and case != lex.Case.NOMINATIVE else noun.german
    if case == lex.Case.DATIVE and noun.german_plural[-1] not in "ns":
        return noun.german_plural + "n"
    return noun.german_plural


def german_number(number: int) -> str:
    """The word of a number from 0 to 999: "dreihundertzweiundvierzig" for 342."""
    hundreds, remainder = lex.split_hundreds(number)
    if hundreds:
        word = ("" if hundreds == 1 else lex.NUMERALS[hundreds].german) + "hundert"
        return word + german_number(remainder) if remainder else word
    if remainder in lex.NUMERALS:
        return lex.NUMERALS[remainder].german
    units = "ein" if remainder % 10 == 1 else lex.NUMERALS[remainder % 10].german
    return f"{units}und{lex.NUMERALS[remainder - remainder % 10].german}"
