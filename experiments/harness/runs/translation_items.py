"""Sums of each sentence from which a score of translations is computed."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.harness.runs.bootstrap import Score, ratio
from jaxformer import optional_dependencies
from jaxformer.text.metrics import lowercased_tokens, make_bleu


def translation_items(
    metric: str,
    hypotheses: Sequence[str],
    references: Sequence[str],
    language: str = "",
    tokenize: str | None = None,
) -> tuple[Float[np.ndarray, "items statistics"], Score] | None:
    """The sums of each sentence that `metric` is made of, and the score of their sum.

    `metric` is bleu or chrf of text of `language`, as `jaxformer.text.metrics` computes them, also
    after `lowercased.`, or exact. None for any other.
    """
    if metric == "exact":
        right = [(a == b, 1) for a, b in zip(hypotheses, references, strict=True)]
        return np.array(right, float), ratio
    lowercased, _, name = metric.rpartition(".")
    if name not in ("bleu", "chrf") or lowercased not in ("", "lowercased"):
        return None
    if lowercased:
        hypotheses = lowercased_tokens(hypotheses, language)
        references = lowercased_tokens(references, language)
        tokenize = "none"
    pairs = list(zip(hypotheses, references, strict=True))
    if name == "chrf":
        chrf = optional_dependencies.load("sacrebleu").metrics.CHRF()
        return np.array([_chrf_sums(chrf, *pair) for pair in pairs], float), partial(_chrf, chrf)
    counter, bleu = make_bleu(language, tokenize), make_bleu(language, tokenize)
    counter.effective_order = True  # or sacreBLEU advises it; it does not change the counts
    return np.array([_bleu_sums(counter, *pair) for pair in pairs], float), partial(_bleu, bleu)


def can_tell(metric: str, items: Float[np.ndarray, "items statistics"]) -> bool:
    """Whether `metric` can tell good translations of the sentences in `items` from bad ones.

    BLEU needs a reference of four words: else it is 0 for every translation.
    """
    reference_words = items[:, 1]
    return metric.rpartition(".")[2] != "bleu" or bool((reference_words >= 4).any())


def _bleu_sums(bleu: Any, hypothesis: str, reference: str) -> list[int]:
    """Lengths of hypothesis and reference, matches of each order, n-grams of each order."""
    score = bleu.sentence_score(hypothesis, [reference])
    return [score.sys_len, score.ref_len, *score.counts, *score.totals]


def _bleu(
    bleu: Any, sums: Float[np.ndarray, "resamples statistics"]
) -> Float[np.ndarray, " resamples"]:
    """The score of each row of sums."""
    orders = bleu.max_ngram_order
    scores = [
        bleu.compute_bleu(
            correct=row[2 : 2 + orders],
            total=row[2 + orders :],
            sys_len=int(row[0]),
            ref_len=int(row[1]),
            smooth_method=bleu.smooth_method,
            smooth_value=bleu.smooth_value,
            effective_order=bleu.effective_order,
            max_ngram_order=orders,
        ).score
        for row in sums.tolist()
    ]
    return np.array(scores)


def _chrf_sums(chrf: Any, hypothesis: str, reference: str) -> list[int]:
    """Numbers of n-grams of hypothesis and reference, and matches, of each order."""
    helpers = optional_dependencies.load("sacrebleu.metrics.helpers")
    sums: list[int] = []
    for order in range(1, chrf.char_order + 1):
        ngrams: Counter = helpers.extract_char_ngrams(hypothesis, order)
        right: Counter = helpers.extract_char_ngrams(reference, order)
        # As in sacreBLEU, n-grams count only where the reference is long enough to have some.
        count = ngrams.total() if right else 0
        sums += [count, right.total(), (ngrams & right).total()]
    return sums


def _chrf(
    chrf: Any, sums: Float[np.ndarray, "resamples statistics"]
) -> Float[np.ndarray, " resamples"]:
    """The score of each row of sums: F-beta of mean precision and mean recall of the orders.

    Orders without n-grams on both sides do not count. Popovic 2015, as in sacreBLEU.
    """
    given, wanted, right = np.moveaxis(sums.reshape(len(sums), -1, 3), -1, 0)
    counts = (given > 0) & (wanted > 0)
    orders = np.maximum(counts.sum(axis=1), 1)
    precision = np.where(counts, right / np.maximum(given, 1), 0.0).sum(axis=1) / orders
    recall = np.where(counts, right / np.maximum(wanted, 1), 0.0).sum(axis=1) / orders
    factor = chrf.beta**2
    denominator = factor * precision + recall
    score = (1 + factor) * precision * recall / np.where(denominator > 0, denominator, 1.0)
    return 100.0 * score
