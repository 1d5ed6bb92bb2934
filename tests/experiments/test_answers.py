"""Scores of answers and summaries, on cases of the scripts of SQuAD and of rouge-score."""

import pytest

from experiments.language_modelling.tasks.squad import normalize_answer, score_answers
from experiments.translation.scoring import score_summaries
from jaxformer.errors import DataError


@pytest.mark.parametrize(
    ("found", "answers", "exact", "f1"),
    [
        ("The Sun.", ["sun"], 1.0, 1.0),
        ("the red sun", ["sun", "red sun set"], 0.0, 2 * 2 / (2 + 3)),
        ("sun sun", ["sun"], 0.0, 2 / 3),
        ("rain", ["sun"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("rain", [], 0.0, 0.0),
        ("", ["sun"], 0.0, 0.0),
        ("an", [], 1.0, 1.0),
        ("rain", ["the", "rain"], 1.0, 1.0),
    ],
)
def test_the_best_of_the_right_answers_counts(found, answers, exact, f1):
    assert score_answers({"q": found}, {"q": answers}) == pytest.approx({"exact": exact, "f1": f1})


def test_scores_are_means_over_the_questions():
    found = score_answers({"a": "sun", "b": "rain", "c": "x"}, {"a": ["sun"], "b": ["snow"]})
    assert found == {"exact": 0.5, "f1": 0.5}
    with pytest.raises(DataError, match="'b'"):
        score_answers({"a": "sun"}, {"a": ["sun"], "b": ["snow"]})
    with pytest.raises(DataError, match="questions"):
        score_answers({}, {})


def test_punctuation_goes_before_articles():
    assert normalize_answer("a-n a.n. U.S. The\tcase") == "us case"
    assert normalize_answer("\u201cthe\u201d") == "\u201c \u201d"


def test_summaries_are_scored_by_stemmed_words():
    found = score_summaries(["runs quickly", "a b"], ["running quickly\nhome", "a b"])
    assert found == pytest.approx(
        {"rouge1": 90.0, "rouge2": 250 / 3, "rougeL": 90.0, "rougeLsum": 90.0}
    )
    with pytest.raises(DataError, match="0 references"):
        score_summaries(["a"], [])
