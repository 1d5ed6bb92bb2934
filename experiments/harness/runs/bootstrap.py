"""Bootstrap over the items of a text: intervals and tests of scores.

A score is a function of sums over the items of the text (sentences, or batches of windows), so that
it can be computed of a resampled text: `sums` are [resamples, statistics]. With one run on each
side, `bootstrap_p_value` equals sacreBLEU's `--paired-bs`. Koehn 2004; over several runs Clark
et al. 2011.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

Items = Float[np.ndarray, "runs items statistics"]


Score = Callable[[Float[np.ndarray, "resamples statistics"]], Float[np.ndarray, " resamples"]]


SEED = 12345
"""The seed of sacreBLEU's test."""


RESAMPLES = 1_000


def percentile_half_width(samples: Float[np.ndarray, " resamples"]) -> float:
    """Half of the interval that holds 95 % of `samples`, as sacreBLEU gives it.

    NaN where that is 0: items that are all alike say nothing about other items.
    """
    cut = len(samples) // 40
    ordered = np.sort(samples)
    return float(ordered[-cut - 1] - ordered[cut]) / 2 or float("nan")


def item_half_width(items: Float[np.ndarray, "items statistics"], score: Score) -> float:
    """Half of the 95 % bootstrap interval of the score of one run over other texts."""
    return percentile_half_width(resampled_scores(items[None], score)[:, 0])


def resampled_scores(
    items: Items, score: Score, resamples: int = RESAMPLES
) -> Float[np.ndarray, "resamples runs"]:
    """The score of each run on texts made of randomly drawn items.

    The same items are drawn for all runs, and for another call with as many items.
    """
    counts = _draw_counts(items.shape[1], resamples)
    return np.stack([score(counts @ run) for run in items], axis=1)


def bootstrap_p_value(
    a: Float[np.ndarray, "resamples M"], b: Float[np.ndarray, "resamples N"], difference: float
) -> float:
    """The share of resamples in which mean scores are further apart than on average by more than
    `difference`."""
    distances = np.abs(a.mean(axis=1) - b.mean(axis=1))
    further = distances - distances.mean() > abs(difference)
    return float((further.sum() + 1) / (len(further) + 1))


def ratio(sums: Float[np.ndarray, "resamples 2"]) -> Float[np.ndarray, " resamples"]:
    """The first sum divided by the second."""
    return sums[:, 0] / sums[:, 1]


def exp_ratio(sums: Float[np.ndarray, "resamples 2"]) -> Float[np.ndarray, " resamples"]:
    """The exponential of `ratio`."""
    return np.exp(ratio(sums))


def _draw_counts(items: int, resamples: int) -> Float[np.ndarray, "resamples items"]:
    """The number of times that each item is drawn in each resample."""
    drawn = np.random.default_rng(SEED).choice(items, size=(resamples, items))
    rows = np.arange(resamples)[:, None] * items
    counts = np.bincount((drawn + rows).ravel(), minlength=resamples * items)
    return counts.reshape(resamples, items).astype(float)
