"""The derivations of the grammar: trees that English and German are both read off."""

from typing import NamedTuple

from experiments.translation.grammar.lexicon import (
    Adjective,
    Link,
    Noun,
    Preposition,
    Pronoun,
    Verb,
)


class Invariable(NamedTuple):
    """An expression with one form in each language: "in the evening", "am Abend"."""

    english: str
    german: str


class NounPhrase(NamedTuple):
    """A noun with its companions; a `count` above 0 stands in the determiner's place."""

    noun: Noun
    determiner: str = "the"  # the, a, this, every, a possessive, or "" for none
    plural: bool = False
    adjective: Adjective | None = None
    count: int = 0

    @property
    def person(self) -> int:
        """Return the row of the verb's forms that agrees with this subject."""
        return 4 if self.plural else 2


class Coordination(NamedTuple):
    """Two noun phrases joined by "and", always a plural."""

    first: NounPhrase
    second: NounPhrase

    @property
    def person(self) -> int:
        """Return the row of the verb's forms that agrees with this subject."""
        return 4


Nominal = NounPhrase | Coordination | Pronoun


class Adjunct(NamedTuple):
    """A preposition and what it governs."""

    preposition: Preposition
    phrase: NounPhrase | Pronoun


class Clause(NamedTuple):
    """A subject with all that is said of it; `tense` is present, past, perfect or a modal."""

    subject: Nominal
    verb: Verb
    tense: str = "present"
    negated: bool = False
    indirect: NounPhrase | Pronoun | None = None
    direct: NounPhrase | Pronoun | None = None
    complement: Invariable | None = None
    adjunct: Adjunct | Invariable | None = None
    time: Invariable | None = None


class Relative(NamedTuple):
    """A clause about its own subject or direct object, which `gap` names."""

    clause: Clause
    gap: str


class Sentence(NamedTuple):
    """A clause, alone or with a relative clause on its subject or a second clause linked to it.

    `front` is "" or the part that comes first: "time" or "adjunct" of a statement, "second" for
    the linked clause. `question` is "" for a statement, "yes" for one that asks yes or no, or a
    question word.
    """

    main: Clause
    front: str = ""
    question: str = ""
    relative: Relative | None = None
    link: Link | None = None
    second: Clause | None = None
