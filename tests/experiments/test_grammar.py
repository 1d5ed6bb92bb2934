"""The synchronous grammar gives correct pairs, one translation each, and a clean split."""

import re
from hashlib import sha256

import numpy as np
import pytest

from experiments.translation.grammar import is_held_out, make_corpus, sample_pair, sampling
from experiments.translation.grammar.english import english_number
from experiments.translation.grammar.german import german_number

NUMBERS = {
    1: ("one", "eins"),
    16: ("sixteen", "sechzehn"),
    77: ("seventy-seven", "siebenundsiebzig"),
    101: ("one hundred one", "hunderteins"),
    730: ("seven hundred thirty", "siebenhundertdreißig"),
}
READ = """Our happy boy showed him a green hat.
Unser glücklicher Junge hat ihm einen grünen Hut gezeigt.
The small woman could give my man my new shirt.
Die kleine Frau konnte meinem Mann mein neues Hemd geben.
Why do you give the sisters every ship on Monday?
Warum gibst du den Schwestern am Montag jedes Schiff?
A happy girl has run to this house.
Ein glückliches Mädchen ist zu diesem Haus gelaufen.
Mothers know that a bicycle arrives.
Mütter wissen, dass ein Fahrrad ankommt.
This old girl did not get up on Thursday.
Dieses alte Mädchen ist am Donnerstag nicht aufgestanden.
The children who did not buy milk cry on Saturday.
Die Kinder, die keine Milch gekauft haben, weinen am Samstag.
Our girl hopes that he thanked the big student.
Unser Mädchen hofft, dass er dem großen Studenten gedankt hat.
Although three friends have laughed at uncles, the sisters laughed with them.
Obwohl drei Freunde über Onkel gelacht haben, haben die Schwestern mit ihnen gelacht.
She invites them today.
Sie lädt sie heute ein.
Her cup costs four euros.
Ihre Tasse kostet vier Euro."""
"""English, and what a speaker of both languages has read: cases, tenses, order, prefixes."""


def test_a_number_is_spelled_as_in_school_and_no_two_share_a_word():
    for number, words in NUMBERS.items():
        assert (english_number(number), german_number(number)) == words
    for spelled in (english_number, german_number):
        assert len({spelled(n) for n in range(1000)}) == 1000
        with pytest.raises(ValueError, match="1000"):
            spelled(1000)


def test_a_sentence_is_clean_text_of_4_to_16_words_with_one_translation():
    rng, translations = np.random.default_rng(5), {}
    letters = re.compile(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüß,-]*( [A-Za-zÄÖÜäöüß-]+,?)*[.?]")
    for source, target in (sample_pair(rng) for _ in range(7_001)):
        assert translations.setdefault(source, target) == target
        assert 4 <= len(source.split(" ")) <= 16 and source[-1] == target[-1]
        assert letters.fullmatch(source) and letters.fullmatch(target), (source, target)
    lines = READ.splitlines()
    assert [translations[source] for source in lines[::2]] == lines[1::2]


def test_a_narrow_vocabulary_betrays_no_second_translation_either(monkeypatch):
    # Few words a round, so that the same English is reached by many derivations.
    for round_ in range(11):

        def narrow(rng, options, round_=round_):
            first = round_ * 7919 + 31 * len(options)
            return options[(first + (rng.random() < 0.1)) % len(options)]

        monkeypatch.setattr(sampling, "pick", narrow)
        rng = np.random.default_rng(round_)
        translations: dict[str, str] = {}
        for source, target in (sample_pair(rng) for _ in range(1000)):
            assert translations.setdefault(source, target) == target
        assert len(translations) < 950


def test_a_seed_gives_the_corpus_that_it_always_gave():
    # The results in the READMEs are about this text. If a change to it is meant, measure them anew.
    corpus = make_corpus(2_003, 31, 29, seed=3)
    lines = [f"{part}\t{en}\t{de}" for part, pairs in corpus.items() for en, de in pairs]
    digest = sha256("\n".join(lines).encode()).hexdigest()
    assert digest.startswith("0bccdfc2c88b3542")


def test_no_sentence_is_in_two_parts_of_a_corpus():
    corpus = make_corpus(5003, 53, 47, seed=1)
    sizes = {name: len(pairs) for name, pairs in corpus.items()}
    assert sizes == {"train": 5003, "validation": 53, "test": 47}
    sources = [pair.source for pairs in corpus.values() for pair in pairs]
    assert len(set(sources)) == len(sources)
    assert not any(is_held_out(pair.source) for pair in corpus["train"])
    assert all(is_held_out(pair.source) for pair in corpus["validation"] + corpus["test"])
