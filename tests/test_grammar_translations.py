"""Hand-written pairs, one or more for each thing in which German differs from English."""

from itertools import chain

import pytest

from experiments.translation.grammar import Pair, realize
from experiments.translation.grammar import lexicon as lex
from experiments.translation.grammar.english import third_person
from experiments.translation.grammar.german import noun_form, present
from experiments.translation.grammar.trees import (
    Adjunct,
    Clause,
    Coordination,
    Invariable,
    NounPhrase,
    Relative,
    Sentence,
)

NOUNS = {noun.english: noun for noun in lex.NOUNS}
ADJECTIVES = {adjective.english: adjective for adjective in lex.ADJECTIVES}
VERBS = {
    verb.prefix + verb.german: verb
    for verb in chain(
        lex.RESTING,
        lex.DWELLING,
        lex.MOVING,
        lex.RISING,
        lex.TRANSITIVE,
        lex.GIVING,
        lex.REPORTING,
        [lex.HAVE, lex.BE, lex.COST, lex.ASK],
    )
}
WAIT, _, DREAM, TALK, _ = lex.GOVERNING
ME, YOU, HE, SHE, WE, THEY = lex.PRONOUNS
TODAY = Invariable("today", "heute")
MONDAY = Invariable("on Monday", "am Montag")
EUROS = Invariable("forty-two euros", "zweiundvierzig Euro")
ROOM = Invariable("in room one hundred one", "in Zimmer hunderteins")
IN, BEHIND = lex.STATIC[0], lex.STATIC[2]


def phrase(words: str, count: int = 0) -> NounPhrase:
    """Return a noun phrase: a determiner or "-", perhaps an adjective, and a noun."""
    determiner, *rest, name = words.split()
    adjective = ADJECTIVES[rest[0]] if rest else None
    plurals = {noun.english_plural: noun for noun in lex.NOUNS if noun.english_plural}
    determiner = {"-": "", "these": "this"}.get(determiner, determiner)
    noun = plurals.get(name) or NOUNS[name]
    return NounPhrase(noun, determiner, name in plurals, adjective, count)


def said(
    subject,
    verb,
    tense="present",
    direct=None,
    *,
    negated=False,
    indirect=None,
    complement=None,
    adjunct=None,
    time=None,
) -> Clause:
    """Return a clause; words stand for the subject, the verb and the direct object."""
    who = phrase(subject) if isinstance(subject, str) else subject
    what = phrase(direct) if isinstance(direct, str) else direct
    verb = VERBS[verb] if isinstance(verb, str) else verb
    return Clause(who, verb, tense, negated, indirect, what, complement, adjunct, time)


def place(preposition, words: str) -> Adjunct:
    return Adjunct(preposition, phrase(words))


def quality(name: str) -> Invariable:
    return Invariable(name, ADJECTIVES[name].german)


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
        Sentence(said("my new car", "sein", complement=quality("expensive"))),
        "My new car is expensive.",
        "Mein neues Auto ist teuer.",
    ),
    (
        Sentence(said("these expensive books", "sein", "past", complement=quality("new"))),
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
        Sentence(said("- children", "spielen", adjunct=place(BEHIND, "- old houses"))),
        "Children play behind old houses.",
        "Kinder spielen hinter alten Häusern.",
    ),
    (
        Sentence(said("the woman", "gehen", "perfect", adjunct=place(lex.INTO, "the museum"))),
        "The woman has gone into the museum.",
        "Die Frau ist ins Museum gegangen.",
    ),
    (
        Sentence(said("the horse", "laufen", adjunct=place(lex.TO, "a boy"), negated=True)),
        "The horse does not run to a boy.",
        "Das Pferd läuft nicht zu einem Jungen.",
    ),
    (
        Sentence(said(HE, "tanzen", adjunct=place(lex.COMPANY[1], "his neighbor"))),
        "He dances without his neighbor.",
        "Er tanzt ohne seinen Nachbarn.",
    ),
    (
        Sentence(said(SHE, "singen", "past", adjunct=place(lex.COMPANY[0], "her friends"))),
        "She sang with her friends.",
        "Sie hat mit ihren Freunden gesungen.",
    ),
    (
        Sentence(said(YOU, "aufstehen", time=Invariable("at eight", "um acht"))),
        "You get up at eight.",
        "Du stehst um acht auf.",
    ),
    (
        Sentence(said(YOU, "aufstehen", "must")),
        "You must get up.",
        "Du musst aufstehen.",
    ),
    (
        Sentence(said(HE, "wissen"), link=lex.THAT, second=said("the girl", "aufstehen")),
        "He knows that the girl gets up.",
        "Er weiß, dass das Mädchen aufsteht.",
    ),
    (
        Sentence(said(WE, "sehen", direct="the dog", time=TODAY), front="time"),
        "Today we see the dog.",
        "Heute sehen wir den Hund.",
    ),
    (
        Sentence(said("the cat", "schlafen", adjunct=place(IN, "the garden")), front="adjunct"),
        "In the garden the cat sleeps.",
        "Im Garten schläft die Katze.",
    ),
    (
        Sentence(
            said("the man", "schlafen"),
            link=lex.BECAUSE,
            second=said(HE, "sehen", "want", "a bird", negated=True),
        ),
        "The man sleeps because he does not want to see a bird.",
        "Der Mann schläft, weil er keinen Vogel sehen will.",
    ),
    (
        Sentence(
            said("the woman", "anrufen", direct=ME),
            front="second",
            link=lex.WHEN,
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
        Sentence(said(ME, "sehen", "present", phrase("- birds", count=342))),
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
            said("the dog", "sein", complement=quality("tired")),
            relative=Relative(said("the women", "suchen", direct="the dog"), "direct"),
        ),
        "The dog that the women look for is tired.",
        "Der Hund, den die Frauen suchen, ist müde.",
    ),
    (
        Sentence(
            said("the children", "lachen"),
            relative=Relative(said("the children", "einladen", "past", SHE), "subject"),
        ),
        "The children who invited her laugh.",
        "Die Kinder, die sie eingeladen haben, lachen.",
    ),
    (
        Sentence(
            said("the friends", "kommen", adjunct=place(lex.OUT_OF, "the church")),
            relative=Relative(said(HE, "danken", direct="the friends"), "direct"),
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
        Sentence(said(YOU, TALK, "want", adjunct=Adjunct(TALK.governs, THEY)), question="yes"),
        "Do you want to talk with them?",
        "Willst du mit ihnen sprechen?",
    ),
    (
        Sentence(
            said(SHE, DREAM, adjunct=Adjunct(DREAM.governs, phrase("the bear"))),
            link=lex.BUT,
            second=said(HE, WAIT, adjunct=Adjunct(WAIT.governs, SHE)),
        ),
        "She dreams of the bear, but he waits for her.",
        "Sie träumt vom Bären, aber er wartet auf sie.",
    ),
    (
        Sentence(
            said(Coordination(phrase("my mother"), phrase("the uncle")), "arbeiten"),
            link=lex.AND,
            second=said("- students", "weinen"),
        ),
        "My mother and the uncle work and students cry.",
        "Meine Mutter und der Onkel arbeiten und Studenten weinen.",
    ),
]


@pytest.mark.parametrize(("derivation", "english", "german"), TABLE, ids=[row[1] for row in TABLE])
def test_a_derivation_is_read_off_as_a_native_speaker_would_write_it(derivation, english, german):
    assert realize(derivation) == Pair(english, german)


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
    assert [present(VERBS[verb], person) for person in range(5)] == forms.split()


def test_an_english_verb_agrees_with_he_and_she():
    bases = "carry buy go wash have cry see".split()
    forms = "carries buys goes washes has cries sees".split()
    assert [third_person(base) for base in bases] == forms


def test_a_noun_takes_its_dative_and_weak_endings():
    assert noun_form(NOUNS["child"], plural=True, case=lex.DATIVE) == "Kindern"
    assert noun_form(NOUNS["car"], plural=True, case=lex.DATIVE) == "Autos"
    assert noun_form(NOUNS["woman"], plural=True, case=lex.DATIVE) == "Frauen"
    assert noun_form(NOUNS["bear"], plural=False, case=lex.NOMINATIVE) == "Bär"
    assert noun_form(NOUNS["bear"], plural=False, case=lex.ACCUSATIVE) == "Bären"
