"""Sums of each sentence from which a score of translations is computed."""

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from experiments.harness.runs.bootstrap import Score, ratio
from jaxformer import optional_dependencies
from jaxformer.text.metrics import lowercased_tokens, make_bleu


def translation_items(
    metric: str,
    hypotheses: list[str],
    references: list[str],
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
    if name == "bleu":
        scorer = make_bleu(language, "none" if lowercased else tokenize)
    else:
        scorer = optional_dependencies.load("sacrebleu").metrics.CHRF()
    if lowercased:
        sides = (lowercased_tokens(side, language) for side in (hypotheses, references))
        hypotheses, references = sides
    items = scorer._extract_corpus_statistics(hypotheses, [references])
    return np.array(items, float), partial(_corpus_scores, scorer)


def _corpus_scores(
    metric: Any, sums: Float[np.ndarray, "resamples statistics"]
) -> Float[np.ndarray, " resamples"]:
    return np.array([metric._compute_score_from_stats(row).score for row in sums.tolist()])
