"""The passages of WikiText-2's held-out articles, as a task to learn from few labels."""

import gzip

import pytest

from experiments.language_modelling.tasks import examples
from experiments.language_modelling.tasks.examples import cut_passages, passages, word_order

# As in the files, a line begins and ends with a space.
VALIDATION = [
    "= Red stars =",
    "The stars are red and old 0 .",
    "= = Colour = =",
    "They glow 1 2 3 4 5 6 7 8 9 10 .",
    "And 11 12 13 14 15 16 17 18 19 .",
    "= <unk> <unk> =",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l m n o p q r s t",
]
TEST = [
    "= Short =",
    "a b c",
    "= Rain =",
    "it rained all night on the 1 2 3 hills and 4 5 6",
    "in the morning 7 8 9 the rain stopped 10 11 12 13 14 15 16 17 18 19",
]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Two small parts of WikiText-2: two labels, passages of 3 words, two of each to test with."""
    for name, lines in (("valid", VALIDATION), ("test", TEST)):
        path = tmp_path / "wikitext-2" / f"{name}.txt.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress("".join(f" {line} \n \n" for line in lines).encode()))
    monkeypatch.setenv("JAXFORMER_DATA", str(tmp_path))
    for name, value in {"ARTICLES": 2, "WORDS": 3, "TEST_TEXTS": 2}.items():
        monkeypatch.setattr(examples, name, value)


def test_a_passage_has_its_number_of_words_and_none_of_the_title(monkeypatch):
    monkeypatch.setattr(examples, "WORDS", 3)
    found = list(cut_passages(" The red Stars are old and RED and far away .", "Red stars"))
    assert found == [" The are old", " and and far"]


def test_the_last_passages_are_to_test_with_and_no_paragraph_is_in_both_parts(small):
    train, test = (dict(zip(texts, labels, strict=True)) for labels, texts, _ in parts())
    assert test == {
        " 14 15 16": "Rain",
        " 17 18 19": "Rain",
        " 13 14 15": "Red stars",
        " 16 17 18": "Red stars",
    }
    assert train == {
        " it rained all": "Rain",
        " night on the": "Rain",
        " 1 2 3": "Rain",
        " hills and 4": "Rain",
        " The are and": "Red stars",
        " old 0 .": "Red stars",
        " They glow 1": "Red stars",
        " 2 3 4": "Red stars",
        " 5 6 7": "Red stars",
        " 8 9 10": "Red stars",
    }


def parts():
    return passages("train"), passages("test")


def test_every_second_sentence_has_two_neighbouring_words_swapped(tmp_path, monkeypatch):
    letters = "abcdefghijklmnopqrstuvwxyz"
    sentences = [f"{letter} 1 b c c d 2 e 3 {letter}" for letter in letters]
    left_out = ["too short to be used", "<unk> a b c d e f g h i", " ".join(letters + letters)]
    left_out += ["1 2 3 4 5 6 7 8 9 10", "a a 1 b b 2 c c 3 d"]
    for name, part in (("valid", sentences[:13]), ("test", sentences[13:])):
        path = tmp_path / "wikitext-2" / f"{name}.txt.gz"
        path.parent.mkdir(exist_ok=True)
        lines = ["= A heading of an article with more than ten words in it ="]
        lines += [" . ".join([*part, *left_out]) + " ."]
        path.write_bytes(gzip.compress("".join(f" {line} \n" for line in lines).encode()))
    monkeypatch.setenv("JAXFORMER_DATA", str(tmp_path))
    train, test = word_order("train"), word_order("test")
    assert train.labels == test.labels == (["original", "swapped"] * 7)[:13]
    for found, part in ((train, sentences[:13]), (test, sentences[13:])):
        words = [text.removeprefix(" ").removesuffix(" .").split() for text in found.texts]
        right = [x for x, label in zip(words, found.labels, strict=True) if label == "original"]
        wrong = [x for x, label in zip(words, found.labels, strict=True) if label == "swapped"]
        assert {" ".join(x) for x in right} < set(part)
        restored = {" ".join(x).replace("c b c", "b c c").replace("c d c", "c c d") for x in wrong}
        assert restored | {" ".join(x) for x in right} == set(part)
        assert all(" b c c d " not in " ".join(x) for x in wrong)
    assert word_order("test") == test


def test_the_real_articles_give_fifty_passages_each_to_test_with(real_data):
    train, test = parts()
    assert len(set(test.labels)) == 10 and len(test.texts) == 500
    assert min(map(train.labels.count, set(test.labels))) > 100
    assert not set(train.texts) & set(test.texts)
