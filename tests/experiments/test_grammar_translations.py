"""Hand-written pairs for the things in which German differs from English."""

import pytest

from experiments.translation.grammar import Pair, english, german, realize
from experiments.translation.grammar import lexicon as lex
from experiments.translation.grammar.derivation import (
    Adjunct,
    Clause,
    Coordination,
    NounPhrase,
    Sentence,
)
from experiments.translation.grammar.lexicon import Case, FixedPhrase

NOUNS = {noun.english: noun for noun in lex.NOUNS}
PLURALS = {noun.english_plural: noun for noun in lex.NOUNS if noun.english_plural}
ADJECTIVES = {adjective.english: adjective for adjective in lex.ADJECTIVES}
VERBS = {
    verb.prefix + verb.german: verb
    for frame, verbs in lex.VERBS.items()
    for verb in verbs
    if frame != "prepositional"
}
*_, TALK, _ = lex.VERBS["prepositional"]
ME, YOU, HE, SHE, _, THEY = lex.PRONOUNS
AND, _, BECAUSE, _, WHEN, _, THAT, _ = lex.CONJUNCTIONS.values()
MONDAY = FixedPhrase("on Monday", "am Montag")


def phrase(words: str) -> NounPhrase:
    """Return a noun phrase: a determiner or "-", perhaps an adjective, and a noun."""
    determiner, *rest, name = words.split()
    adjective = ADJECTIVES[rest[0]] if rest else None
    determiner = "" if determiner == "-" else determiner
    noun = PLURALS.get(name) or NOUNS[name]
    return NounPhrase(noun, determiner, name in PLURALS, adjective)


def said(subject, verb, tense="present", direct=None, **others) -> Clause:
    """Return a clause; words stand for the subject, the verb and the direct object."""
    subject = phrase(subject) if isinstance(subject, str) else subject
    direct = phrase(direct) if isinstance(direct, str) else direct
    verb = VERBS[verb] if isinstance(verb, str) else verb
    return Clause(subject, verb, tense, direct=direct, **others)


def place(preposition: str, words: str) -> Adjunct:
    return Adjunct(lex.PREPOSITIONS[preposition], phrase(words))


def governed(verb, phrase) -> Adjunct:
    return Adjunct(lex.Preposition(verb.preposition, verb.german_preposition, verb.case), phrase)


TABLE = [
    (
        Sentence(said("the boy", "geben", direct="his red ball", indirect=phrase("a sick child"))),
        "The boy gives a sick child his red ball.",
        "Der Junge gibt einem kranken Kind seinen roten Ball.",
    ),
    (
        Sentence(said(SHE, "zeigen", "past", "our horse", indirect=HE)),
        "She showed him our horse.",
        "Sie hat ihm unser Pferd gezeigt.",
    ),
    (
        Sentence(said("the woman", "gehen", "perfect", adjunct=place("into", "the museum"))),
        "The woman has gone into the museum.",
        "Die Frau ist ins Museum gegangen.",
    ),
    (
        Sentence(said(HE, "wissen"), conjunction=THAT, second=said("the girl", "aufstehen")),
        "He knows that the girl gets up.",
        "Er weiß, dass das Mädchen aufsteht.",
    ),
    (
        Sentence(
            said("the man", "schlafen"),
            conjunction=BECAUSE,
            second=said(HE, "sehen", "want to", "a bird", negated=True),
        ),
        "The man sleeps because he does not want to see a bird.",
        "Der Mann schläft, weil er keinen Vogel sehen will.",
    ),
    (
        Sentence(
            said("the woman", "anrufen", direct=ME),
            second_first=True,
            conjunction=WHEN,
            second=said("the train", "ankommen"),
        ),
        "When the train arrives, the woman calls me.",
        "Wenn der Zug ankommt, ruft die Frau mich an.",
    ),
    (
        Sentence(said("the man", "finden", "past", "the key", negated=True, time=MONDAY)),
        "The man did not find the key on Monday.",
        "Der Mann hat den Schlüssel am Montag nicht gefunden.",
    ),
    (
        Sentence(
            said("the friends", "kommen", adjunct=place("out of", "the church")),
            relative=said(HE, "danken"),
            relative_is_object=True,
        ),
        "The friends that he thanks come out of the church.",
        "Die Freunde, denen er dankt, kommen aus der Kirche.",
    ),
    (
        Sentence(said(YOU, TALK, "want to", adjunct=governed(TALK, THEY)), question="yes-no"),
        "Do you want to talk with them?",
        "Willst du mit ihnen sprechen?",
    ),
    (
        Sentence(
            said(Coordination(phrase("my mother"), phrase("the uncle")), "arbeiten"),
            conjunction=AND,
            second=said("- students", "weinen"),
        ),
        "My mother and the uncle work and students cry.",
        "Meine Mutter und der Onkel arbeiten und Studenten weinen.",
    ),
]


@pytest.mark.parametrize(("derivation", "source", "target"), TABLE, ids=[row[1] for row in TABLE])
def test_a_derivation_is_read_off_as_a_native_speaker_would_write_it(derivation, source, target):
    assert realize(derivation) == Pair(source, target)


def test_verbs_and_nouns_take_their_endings():
    german_forms = {
        "arbeiten": "arbeite arbeitest arbeitet arbeiten arbeiten",
        "grüßen": "grüße grüßt grüßt grüßen grüßen",
        "einladen": "lade lädst lädt laden laden",
        "wissen": "weiß weißt weiß wissen wissen",
    }
    for verb, forms in german_forms.items():
        assert [german.present(VERBS[verb], person) for person in range(5)] == forms.split()
    bases, forms = "carry buy go wash have".split(), "carries buys goes washes has".split()
    assert [english.present(base, lex.THIRD_SINGULAR) for base in bases] == forms
    datives = {"child": "Kindern", "car": "Autos", "woman": "Frauen"}
    for noun, form in datives.items():
        assert german.noun_form(NOUNS[noun], plural=True, case=Case.DATIVE) == form
