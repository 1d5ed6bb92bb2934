"""Hand-written pairs, one or more for each thing in which German differs from English."""

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
WAIT, _, DREAM, TALK, _ = lex.VERBS["prepositional"]
ME, YOU, HE, SHE, WE, THEY = lex.PRONOUNS
AND, BUT, BECAUSE, ALTHOUGH, WHEN, IF, THAT, WHETHER = lex.CONJUNCTIONS.values()
TODAY = FixedPhrase("today", "heute")
MONDAY = FixedPhrase("on Monday", "am Montag")
EUROS = FixedPhrase("forty-two euros", "zweiundvierzig Euro")
ROOM = FixedPhrase("in room one hundred one", "in Zimmer hunderteins")


def phrase(words: str, number: int = 0) -> NounPhrase:
    """Return a noun phrase: a determiner or "-", perhaps an adjective, and a noun."""
    determiner, *rest, name = words.split()
    adjective = ADJECTIVES[rest[0]] if rest else None
    determiner = {"-": "", "these": "this"}.get(determiner, determiner)
    noun = PLURALS.get(name) or NOUNS[name]
    return NounPhrase(noun, determiner, name in PLURALS, adjective, number)


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
        Sentence(said("the old man", "sehen", direct="a small dog")),
        "The old man sees a small dog.",
        "Der alte Mann sieht einen kleinen Hund.",
    ),
    (
        Sentence(said("a old aunt", "kaufen", direct="- fresh milk")),
        "An old aunt buys fresh milk.",
        "Eine alte Tante kauft frische Milch.",
    ),
    (
        Sentence(said(THEY, "trinken", direct="- warm coffee")),
        "They drink warm coffee.",
        "Sie trinken warmen Kaffee.",
    ),
    (
        Sentence(said("my new car", "sein", complement=ADJECTIVES["expensive"])),
        "My new car is expensive.",
        "Mein neues Auto ist teuer.",
    ),
    (
        Sentence(said("these expensive books", "sein", "past", complement=ADJECTIVES["new"])),
        "These expensive books were new.",
        "Diese teuren Bücher waren neu.",
    ),
    (
        Sentence(said("the boy", "geben", direct="his red ball", indirect=phrase("a sick child"))),
        "The boy gives a sick child his red ball.",
        "Der Junge gibt einem kranken Kind seinen roten Ball.",
    ),
    (
        Sentence(said("every teacher", "helfen", direct="the young students")),
        "Every teacher helps the young students.",
        "Jeder Lehrer hilft den jungen Studenten.",
    ),
    (
        Sentence(said(SHE, "zeigen", "past", "our horse", indirect=HE)),
        "She showed him our horse.",
        "Sie hat ihm unser Pferd gezeigt.",
    ),
    (
        Sentence(said("- children", "spielen", adjunct=place("behind", "- old houses"))),
        "Children play behind old houses.",
        "Kinder spielen hinter alten Häusern.",
    ),
    (
        Sentence(said("the woman", "gehen", "perfect", adjunct=place("into", "the museum"))),
        "The woman has gone into the museum.",
        "Die Frau ist ins Museum gegangen.",
    ),
    (
        Sentence(said("the horse", "laufen", adjunct=place("to", "a boy"), negated=True)),
        "The horse does not run to a boy.",
        "Das Pferd läuft nicht zu einem Jungen.",
    ),
    (
        Sentence(said(HE, "tanzen", adjunct=place("without", "his neighbor"))),
        "He dances without his neighbor.",
        "Er tanzt ohne seinen Nachbarn.",
    ),
    (
        Sentence(said(SHE, "singen", "past", adjunct=place("with", "her friends"))),
        "She sang with her friends.",
        "Sie hat mit ihren Freunden gesungen.",
    ),
    (
        Sentence(said(YOU, "aufstehen", time=FixedPhrase("at eight", "um acht"))),
        "You get up at eight.",
        "Du stehst um acht auf.",
    ),
    (Sentence(said(YOU, "aufstehen", "must")), "You must get up.", "Du musst aufstehen."),
    (
        Sentence(said(HE, "wissen"), conjunction=THAT, second=said("the girl", "aufstehen")),
        "He knows that the girl gets up.",
        "Er weiß, dass das Mädchen aufsteht.",
    ),
    (
        Sentence(said(WE, "sehen", direct="the dog"), fronted=TODAY),
        "Today we see the dog.",
        "Heute sehen wir den Hund.",
    ),
    (
        Sentence(said("the cat", "schlafen"), fronted=place("in", "the garden")),
        "In the garden the cat sleeps.",
        "Im Garten schläft die Katze.",
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
        Sentence(said(WE, "haben", direct="- apples", negated=True)),
        "We do not have apples.",
        "Wir haben keine Äpfel.",
    ),
    (
        Sentence(said(ME, "wegwerfen", "could", "the letter", negated=True)),
        "I could not throw the letter away.",
        "Ich konnte den Brief nicht wegwerfen.",
    ),
    (
        Sentence(said("the bear", "folgen", "perfect", WE)),
        "The bear has followed us.",
        "Der Bär ist uns gefolgt.",
    ),
    (
        Sentence(said(ME, "sehen", "present", phrase("- birds", number=342))),
        "I see three hundred forty-two birds.",
        "Ich sehe dreihundertzweiundvierzig Vögel.",
    ),
    (
        Sentence(said("the hat", "kosten", complement=EUROS)),
        "The hat costs forty-two euros.",
        "Der Hut kostet zweiundvierzig Euro.",
    ),
    (
        Sentence(said(YOU, "wohnen", adjunct=ROOM)),
        "You live in room one hundred one.",
        "Du wohnst in Zimmer hunderteins.",
    ),
    (
        Sentence(
            said("the dog", "sein", complement=ADJECTIVES["tired"]),
            relative=said("the women", "suchen"),
            relative_is_object=True,
        ),
        "The dog that the women look for is tired.",
        "Der Hund, den die Frauen suchen, ist müde.",
    ),
    (
        Sentence(
            said("the children", "lachen"), relative=said("the children", "einladen", "past", SHE)
        ),
        "The children who invited her laugh.",
        "Die Kinder, die sie eingeladen haben, lachen.",
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
        Sentence(said("the student", "schicken", direct="a card", indirect=ME), question="why"),
        "Why does the student send me a card?",
        "Warum schickt der Student mir eine Karte?",
    ),
    (
        Sentence(said(YOU, TALK, "want to", adjunct=governed(TALK, THEY)), question="yes-no"),
        "Do you want to talk with them?",
        "Willst du mit ihnen sprechen?",
    ),
    (
        Sentence(
            said(SHE, DREAM, adjunct=governed(DREAM, phrase("the bear"))),
            conjunction=BUT,
            second=said(HE, WAIT, adjunct=governed(WAIT, SHE)),
        ),
        "She dreams of the bear, but he waits for her.",
        "Sie träumt vom Bären, aber er wartet auf sie.",
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


@pytest.mark.parametrize(
    ("verb", "forms"),
    [
        ("arbeiten", "arbeite arbeitest arbeitet arbeiten arbeiten"),
        ("tanzen", "tanze tanzt tanzt tanzen tanzen"),
        ("grüßen", "grüße grüßt grüßt grüßen grüßen"),
        ("essen", "esse isst isst essen essen"),
        ("waschen", "wasche wäschst wäscht waschen waschen"),
        ("einladen", "lade lädst lädt laden laden"),
        ("helfen", "helfe hilfst hilft helfen helfen"),
        ("finden", "finde findest findet finden finden"),
        ("wissen", "weiß weißt weiß wissen wissen"),
        ("sein", "bin bist ist sind sind"),
    ],
)
def test_a_german_verb_agrees_with_each_person(verb, forms):
    assert [german.present(VERBS[verb], person) for person in range(5)] == forms.split()


def test_an_english_verb_agrees_with_he_and_she():
    bases = "carry buy go wash have cry see".split()
    forms = "carries buys goes washes has cries sees".split()
    assert [english.present(base, lex.THIRD_SINGULAR) for base in bases] == forms


@pytest.mark.parametrize(
    ("noun", "plural", "case", "form"),
    [
        ("child", True, Case.DATIVE, "Kindern"),
        ("car", True, Case.DATIVE, "Autos"),
        ("woman", True, Case.DATIVE, "Frauen"),
        ("bear", False, Case.NOMINATIVE, "Bär"),
        ("bear", False, Case.ACCUSATIVE, "Bären"),
    ],
)
def test_a_noun_takes_its_dative_and_weak_endings(noun, plural, case, form):
    assert german.noun_form(NOUNS[noun], plural=plural, case=case) == form
