"""Minimum Bayes risk: of several texts, how good each is if any of them may be the right one."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from jaxformer import optional_dependencies

Utility = Callable[[str, str], float]
"""utility(hypothesis, reference): how good `hypothesis` is where `reference` is right."""

UtilityName = Literal["chrf", "bleu"]


def sentence_utility(name: UtilityName) -> Utility:
    """sacreBLEU's score (0 to 100) of one sentence: chrF2, or BLEU with effective order.

    Raises `MissingExtra` without sacrebleu.
    """
    metrics = optional_dependencies.load("sacrebleu").metrics
    metric = metrics.CHRF() if name == "chrf" else metrics.BLEU(effective_order=True)
    return lambda hypothesis, reference: metric.sentence_score(hypothesis, [reference]).score


def expected_utilities(samples: Sequence[str], utility: Utility) -> list[float]:
    """The mean utility of each of `samples` over all of them (Eikema & Aziz 2020, section 6).

    The samples stand for the model's distribution. Equal ones are compared once and counted.

    >>> expected_utilities(["a", "b", "a", "a"], lambda hypothesis, text: float(hypothesis == text))
    [0.75, 0.25, 0.75, 0.75]
    """
    counts = Counter(samples)
    values = {
        hypothesis: math.fsum(utility(hypothesis, text) * n for text, n in counts.items())
        for hypothesis in counts
    }
    return [values[sample] / len(samples) for sample in samples]
