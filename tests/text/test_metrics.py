"""Scores of translations and of probabilities."""

import math

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from jaxformer.errors import ConfigError, DataError
from jaxformer.text import metrics
from jaxformer.text.data import read_lines
from jaxformer.text.metrics import Likelihood, TextSize

REFERENCES = [
    "Der Hund läuft über die grüne Wiese.",
    "Ein Mann sitzt auf der Bank und liest.",
    "Zwei Kinder spielen im Park mit einem Ball.",
]


def test_a_perfect_translation_scores_100_and_says_how():
    scores = metrics.score_translations(REFERENCES, REFERENCES)
    assert scores.bleu == pytest.approx(100) and scores.chrf == pytest.approx(100)
    assert scores.sentences == 3
    assert "case:mixed" in scores.bleu_signature and "tok:13a" in scores.bleu_signature
    assert "nc:6" in scores.chrf_signature


def test_bleu_of_one_wrong_word_is_the_product_worked_out_by_hand():
    # 5 tokens, the last wrong: precisions 4/5, 3/4, 2/3, 1/2; their product is 1/5.
    scores = metrics.score_translations(["a b c d x"], ["a b c d e"])
    assert scores.bleu == pytest.approx(100 * 0.2**0.25)


def test_bleu_counts_the_words_that_the_language_has():
    """Chinese has no spaces: 13a takes a sentence for one word."""
    made, right = ["我今天去银行取钱。"], ["我昨天去银行取钱。"]
    for tokenize, languages in {
        "zh": ("zh", "zh-CN", "zho_Hans", "cmn_Hans", "chi"),
        "char": ("zh",),
    }.items():
        expected = sacrebleu.corpus_bleu(made, [right], tokenize=tokenize).score
        for language in languages:
            named = None if tokenize == language[:2] else tokenize
            found = metrics.score_translations(made, right, language, named)
            assert found.bleu == expected > 50
            assert f"|tok:{tokenize}|" in found.bleu_signature
    assert "|tok:13a|" in metrics.score_translations(["ein"], ["ein"], "de").bleu_signature
    with pytest.warns(UserWarning, match="language"):
        assert metrics.score_translations(made, right).bleu == 0
    with pytest.raises(ConfigError, match="tokenize='words'"):
        metrics.score_translations(made, right, tokenize="words")


def test_case_counts_unless_lowercased():
    shouted = [line.upper() for line in REFERENCES]
    assert metrics.score_translations(shouted, REFERENCES).bleu < 20
    scores = metrics.score_lowercased(shouted, REFERENCES, "de")
    assert scores.bleu == pytest.approx(100)
    assert scores.bleu_signature.startswith("lc.norm.moses:de|nrefs:1")
    assert "tok:none" in scores.bleu_signature


def test_lowercased_tokens_follow_moses_on_the_hard_cases():
    lines = ["Sie sagt: „Komm.“", "Was ist's?", "Um 3,5 m & 10%", ""]
    assert metrics.lowercased_tokens(lines, "de") == [
        "sie sagt : &quot; komm &quot; .",
        "was ist &apos; s ?",
        "um 3,5 m &amp; 10 %",
        "",
    ]


@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_the_published_lowercased_references_are_reproduced_line_for_line(language, real_data):
    folder = real_data / "multi30k"
    for split, count in (("test_2016_flickr", 1000), ("val", 1014)):
        published = read_lines(folder / "tok" / f"{split}.lc.norm.tok.{language}.gz")
        raw = read_lines(folder / f"{split}.{language}.gz")
        assert len(published) == count
        assert metrics.lowercased_tokens(raw, language) == published


@pytest.mark.parametrize("language", ["German", "", "de-DE"])
def test_a_language_is_a_code(language):
    with pytest.raises(ConfigError, match="language "):
        metrics.lowercased_tokens(REFERENCES, language)


def test_one_bare_string_is_no_sequence_of_texts():
    with pytest.raises(DataError, match="one string"):
        metrics.score_translations("abc", "abd")


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    "score",
    [
        metrics.score_translations,
        lambda a, b: metrics.score_lowercased(a, b, "de"),
        metrics.exact_match,
    ],
)
def test_unequal_counts_are_refused_with_both_numbers(score, count):
    with pytest.raises(DataError, match=f"{count} hypotheses"):
        score(REFERENCES[:count], REFERENCES)
    with pytest.raises(DataError, match="0 hypotheses"):
        score([], [])


def test_exact_match_is_a_share():
    assert metrics.exact_match(["a", "b ", "c"], ["a", "b", "c"]) == pytest.approx(2 / 3)


def test_the_four_measures_of_a_text_worked_out_by_hand():
    # 6 tokens of 8 nats together, 2 words and a line feed, 11 bytes.
    likelihood = Likelihood(nats=8.0, tokens=6, words=3, bytes=11)
    assert likelihood.loss == pytest.approx(4 / 3)
    assert likelihood.perplexity == pytest.approx(math.exp(4 / 3))
    assert likelihood.word_perplexity == pytest.approx(math.exp(8 / 3))
    assert likelihood.bits_per_byte == pytest.approx(8 / (11 * math.log(2)))
    assert likelihood._replace(nats=1e6).word_perplexity == math.inf


@pytest.mark.parametrize(
    "measure, message",
    [
        ("loss", "the loss needs at least one token, got 0"),
        ("perplexity", "perplexity needs at least one token, got 0"),
        ("word_perplexity", "perplexity needs at least one word, got 0"),
        ("bits_per_byte", "bits per byte needs at least one byte, got 0"),
    ],
)
def test_nothing_has_no_measure(measure, message):
    with pytest.raises(DataError, match=message):
        getattr(Likelihood(0.0, 0, 0, 0), measure)


def test_words_stand_between_white_space_and_a_line_feed_is_one_more():
    for text, words in (
        ("", 0),
        ("the cat", 2),
        (" the  cat sat .\n\n \tOn it .\n", 4 + 1 + 1 + 3 + 1),
    ):
        assert metrics.count_text([text]).words == words
    assert metrics.count_text(["grün \n", "€"]) == TextSize(words=3, bytes=10)


@given(st.text("ab \n\u00a0ß"), st.lists(st.integers(0, 20)))
def test_the_count_does_not_depend_on_where_blocks_end(text, cuts):
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    blocks = [text[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    expected = TextSize(len(text.replace("\n", " x ").split()), len(text.encode()))
    assert metrics.count_text(blocks) == expected
