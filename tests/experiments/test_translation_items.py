"""Scores of resampled sentences equal those that sacreBLEU computes of their text."""

import random

import numpy as np
import pytest

from experiments.harness.runs.translation_items import translation_items
from jaxformer.text.metrics import lowercased_tokens

sacrebleu = pytest.importorskip("sacrebleu")
WORDS = "the a Haus (hi) , . sun ü 12.5 x".split()


def texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(0, 9))) for _ in range(37)]
    return [*lines, "", "sun"] if seed else [*lines, "sun x", ""]


@pytest.mark.parametrize("metric", ["bleu", "chrf", "lowercased.bleu"])
def test_the_sums_of_drawn_sentences_give_the_score_of_the_text_that_they_make(metric):
    if metric.startswith("lowercased"):
        pytest.importorskip("sacremoses")
    hypotheses, references = texts(0), texts(1)
    found = translation_items(metric, hypotheses, references, "de")
    assert found is not None
    items, score = found
    drawn = np.random.default_rng(5).integers(0, len(items), (11, len(items)))
    drawn[0] = np.arange(len(items))
    drawn[1] = len(items) - 2  # an empty reference alone
    if metric.startswith("lowercased"):
        hypotheses, references = (lowercased_tokens(x, "de") for x in (hypotheses, references))
    scorers = {
        "bleu": sacrebleu.metrics.BLEU(),
        "chrf": sacrebleu.metrics.CHRF(),
        "lowercased.bleu": sacrebleu.metrics.BLEU(tokenize="none", force=True),
    }
    expected = [
        scorers[metric].corpus_score([hypotheses[i] for i in row], [[references[i] for i in row]])
        for row in drawn
    ]
    result = score(np.stack([items[row].sum(axis=0) for row in drawn]))
    np.testing.assert_array_equal(result, [each.score for each in expected])


def test_a_metric_that_is_no_sum_over_sentences_has_no_items():
    assert translation_items("rougeL", ["a"], ["a"]) is None
    assert translation_items("cased.bleu", ["a"], ["a"]) is None
