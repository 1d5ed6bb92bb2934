"""The expected utility of texts, and the one of the least risk."""

import itertools

import numpy as np
import pytest
import sacrebleu

from jaxformer.pipelines import Translation, rank_by_utility
from jaxformer.text.minimum_bayes_risk import expected_utilities, sentence_utility

WORDS = "der die das Hund Vogel Baum sieht mag".split()


def overlap(hypothesis, reference):
    """Asymmetric on purpose: the share of the hypothesis' letters in the reference."""
    return sum(letter in reference for letter in hypothesis) / max(len(hypothesis), 1)


def sampled(texts):
    return [Translation(text, -1.0, [i], [-1.0]) for i, text in enumerate(texts)]


@pytest.fixture
def texts(rng):
    """17 sentences; some are equal."""
    distinct = [" ".join(rng.choice(WORDS, rng.integers(1, 7))) for _ in range(11)]
    return [distinct[i] for i in rng.integers(0, 11, 17)]


@pytest.mark.parametrize("name", ["chrf", "bleu"])
def test_the_expected_utility_is_the_mean_over_all_pairs_of_samples(texts, name, assert_equal):
    score = {
        "chrf": lambda h, r: sacrebleu.sentence_chrf(h, [r]).score,
        "bleu": lambda h, r: sacrebleu.sentence_bleu(h, [r], use_effective_order=True).score,
    }[name]
    table = np.array([score(h, r) for h, r in itertools.product(texts, texts)]).reshape(17, 17)
    assert len(set(texts)) < 17 and table.min() < 50 < table.max()
    assert_equal(expected_utilities(texts, sentence_utility(name)), table.mean(axis=1))


def test_the_first_argument_of_a_utility_is_the_hypothesis(assert_equal):
    assert_equal(expected_utilities(["ab", "abcd"], overlap), [1.0, 0.75])


def test_distinct_samples_are_ranked_by_utility_and_ties_by_the_order_of_drawing(texts):
    found = rank_by_utility(sampled(texts), sentence_utility("chrf"))
    values = expected_utilities(texts, sentence_utility("chrf"))
    assert sorted(x.text for x in found) == sorted(set(texts))
    assert found[0].text == texts[int(np.argmax(values))]
    assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
    assert all(x.score == values[x.ids[0]] and texts.index(x.text) == x.ids[0] for x in found)
    for order in ([3, 0, 2, 1], [1, 3, 2, 0]):
        tied = [texts[i] for i in dict.fromkeys(order)]
        assert [x.text for x in rank_by_utility(sampled(tied), lambda h, r: 1.0)] == list(
            dict.fromkeys(tied)
        )


def test_one_sample_and_an_empty_one_have_a_utility():
    assert [x.text for x in rank_by_utility(sampled([""]), sentence_utility("chrf"))] == [""]
    assert expected_utilities(["", "", "a b"], sentence_utility("bleu"))[2] > 0
