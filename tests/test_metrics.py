"""Scores of translations and of probabilities."""

import os
from pathlib import Path

import pytest

from jaxformer import metrics
from jaxformer.config import ConfigError
from jaxformer.data import DataError, read_lines

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


def test_case_counts_unless_lowercased():
    shouted = [line.upper() for line in REFERENCES]
    assert metrics.score_translations(shouted, REFERENCES).bleu < 20
    scores = metrics.score_lowercased(shouted, REFERENCES, "de")
    assert scores.bleu == pytest.approx(100)
    assert scores.bleu_signature.startswith("lc.norm.moses:de|nrefs:1")
    assert "tok:none" in scores.bleu_signature


def test_tokenized_text_is_scored_as_it_stands():
    hypothesis, reference = ["a b c d ."], ["a b c d."]
    assert metrics.score_translations(hypothesis, reference).bleu == pytest.approx(100)
    assert metrics.score_tokenized(hypothesis, reference).bleu < 70


def test_lowercased_tokens_follow_moses_on_the_hard_cases():
    lines = ["Sie sagt: „Komm.“", "Was ist's?", "Um 3,5 m & 10%", ""]
    assert metrics.lowercased_tokens(lines, "de") == [
        "sie sagt : &quot; komm &quot; .",
        "was ist &apos; s ?",
        "um 3,5 m &amp; 10 %",
        "",
    ]


@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_the_published_lowercased_references_are_reproduced_line_for_line(language):
    if "JAXFORMER_DATA" not in os.environ:
        pytest.skip("JAXFORMER_DATA is not set: Multi30k is needed")
    folder = Path(os.environ["JAXFORMER_DATA"]) / "multi30k"
    for split, count in (("test_2016_flickr", 1000), ("val", 1014)):
        published = read_lines(folder / "tok" / f"{split}.lc.norm.tok.{language}.gz")
        raw = read_lines(folder / f"{split}.{language}.gz")
        assert len(published) == count
        assert metrics.lowercased_tokens(raw, language) == published


@pytest.mark.parametrize("language", ["German", "", "de-DE"])
def test_a_language_is_a_code(language):
    with pytest.raises(ConfigError, match="language must be a code like 'de'"):
        metrics.lowercased_tokens(REFERENCES, language)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    "score",
    [
        metrics.score_translations,
        metrics.score_tokenized,
        lambda a, b: metrics.score_lowercased(a, b, "de"),
        metrics.bleu_interval,
        metrics.exact_match,
    ],
)
def test_unequal_counts_are_refused_with_both_numbers(score, count):
    with pytest.raises(DataError, match=f"{count} hypotheses and 3 references"):
        score(REFERENCES[:count], REFERENCES)
    with pytest.raises(DataError, match="0 hypotheses and 0 references"):
        score([], [])


def test_the_interval_encloses_the_score_and_repeats():
    references = REFERENCES * 11
    wrong = [line.replace("Der", "Dem") if i % 2 else line for i, line in enumerate(references)]
    low, high = metrics.bleu_interval(wrong, references, resamples=101)
    bleu = metrics.score_translations(wrong, references).bleu
    assert 50 < low < bleu < high < 100
    assert (low, high) == metrics.bleu_interval(wrong, references, resamples=101)


def test_exact_match_is_a_share():
    assert metrics.exact_match(["a", "b ", "c"], ["a", "b", "c"]) == pytest.approx(2 / 3)


def test_perplexity_of_a_uniform_guess_is_the_vocabulary():
    assert metrics.perplexity(7 * 1.6094379124341003, 7) == pytest.approx(5)
    assert metrics.perplexity(1e6, 1) == float("inf")
    with pytest.raises(DataError, match="at least one token, got 0"):
        metrics.perplexity(1.0, 0)


def test_a_byte_guessed_among_256_costs_8_bits():
    assert metrics.bits_per_byte(3 * 5.545177444479562, 3) == pytest.approx(8)
    with pytest.raises(DataError, match="at least one byte, got 0"):
        metrics.bits_per_byte(1.0, 0)
