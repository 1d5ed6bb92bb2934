"""Derivations: the trees from which both the English and the German sentence are realized."""

from typing import NamedTuple

from experiments.translation.grammar import lexicon as lex


class NounPhrase(NamedTuple):
    """A noun with its determiner and adjective; a `number` above 0 replaces the determiner."""

    noun: lex.Noun
    determiner: str = "the"  # the, a, no, this, every, a possessive, or "" for none
    plural: bool = False
    adjective: lex.Adjective | None = None
    number: int = 0

    @property
    def person(self) -> int:
        """The person in which a verb agrees with this subject."""
        return lex.THIRD_PLURAL if self.plural else lex.THIRD_SINGULAR


class Coordination(NamedTuple):
    """Two noun phrases joined by "and"."""

    first: NounPhrase
    second: NounPhrase

    @property
    def person(self) -> int:
        """The person in which a verb agrees with this subject."""
        return lex.THIRD_PLURAL


class Adjunct(NamedTuple):
    """A prepositional phrase."""

    preposition: lex.Preposition
    phrase: NounPhrase | lex.Pronoun


Nominal = NounPhrase | Coordination | lex.Pronoun
Constituent = Nominal | Adjunct | lex.Adjective | lex.FixedPhrase


class Clause(NamedTuple):
    """A subject and its predicate; `tense` is present, past, perfect or a modal."""

    subject: Nominal
    verb: lex.Verb
    tense: str = "present"
    negated: bool = False
    indirect: NounPhrase | lex.Pronoun | None = None
    direct: NounPhrase | lex.Pronoun | None = None
    complement: lex.Adjective | lex.FixedPhrase | None = None
    adjunct: Adjunct | lex.FixedPhrase | None = None
    time: lex.FixedPhrase | None = None


class Sentence(NamedTuple):
    """A main clause, perhaps with a fronted constituent, a relative clause or a second clause.

    `question` is "" for a statement, "yes-no", or a question word. The relative clause modifies the
    subject; its pronoun is its subject or, with `relative_is_object`, its direct object. The second
    clause has the conjunction, and comes first if `second_first`.
    """

    main: Clause
    fronted: Adjunct | lex.FixedPhrase | None = None
    question: str = ""
    relative: Clause | None = None
    relative_is_object: bool = False
    conjunction: lex.Conjunction | None = None
    second: Clause | None = None
    second_first: bool = False

    def punctuate(self, words: str) -> str:
        """Words with single spaces, a capital letter and a full stop or question mark."""
        text = " ".join(words.split()).replace(" ,", ",")
        return text[0].upper() + text[1:] + ("?" if self.question else ".")
