"""Intervals and tests of scores that several runs reached on the same text.

A score is a function of sums over the items of the text (sentences, or batches of windows), so that
it can be computed of a resampled text: `sums` are [resamples, statistics]. With one run on each
side, `bootstrap_p_value` and `randomization_p_value` are those of sacreBLEU's `--paired-bs` and
`--paired-ar`. Koehn 2004; Riezler and Maxwell 2005; over several runs Clark et al. 2011.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from jaxformer import optional_dependencies
from jaxformer.text.metrics import lowercased_tokens, make_bleu

Items = Float[np.ndarray, "runs items statistics"]
Score = Callable[[Float[np.ndarray, "resamples statistics"]], Float[np.ndarray, " resamples"]]

SEED = 12345
"""The seed of sacreBLEU's tests."""
RESAMPLES = 1_000
TRIALS = 10_000


def t_half_width(values: Float[np.ndarray, " runs"]) -> float:
    """Half of the 95 % t-interval of the mean of `values`; NaN for fewer than two."""
    if len(values) < 2:
        return float("nan")
    error = values.std(ddof=1) / np.sqrt(len(values))
    return float(stdtrit(len(values) - 1, 0.975) * error)


def welch_half_width(a: Float[np.ndarray, " M"], b: Float[np.ndarray, " N"]) -> float:
    """Half of the 95 % interval of the difference of two means; NaN for fewer than two values."""
    if min(len(a), len(b)) < 2:
        return float("nan")
    errors = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    if not errors.any():
        return 0.0
    freedom = errors.sum() ** 2 / (errors**2 / (np.array([len(a), len(b)]) - 1)).sum()
    return float(stdtrit(freedom, 0.975) * np.sqrt(errors.sum()))


def percentile_half_width(samples: Float[np.ndarray, " resamples"]) -> float:
    """Half of the interval that holds 95 % of `samples`, as sacreBLEU gives it.

    NaN where that is 0: items that are all alike say nothing about other items.
    """
    cut = len(samples) // 40
    ordered = np.sort(samples)
    return float(ordered[-cut - 1] - ordered[cut]) / 2 or float("nan")


def plus_minus(half: float, form: str) -> str:
    """Text such as " ± 0.12" for a half width in the format `form`; "" for NaN."""
    return "" if np.isnan(half) else f" ± {half:{form}}"


def decimals(value: float, half: float = float("nan")) -> int:
    """The decimals of `value` that its 95 % interval of the half width `half` leaves certain.

    The half width keeps two digits, and one where they are above 35, as the Particle Data Group
    rounds. Without a half width (NaN or 0) those of `value`, at most four, two from 10 on, and none
    from 1,000.

    >>> decimals(41.38, 1.56), decimals(41.38, 0.41), decimals(41.38)
    (1, 1, 2)
    """
    if np.isnan(half) or half <= 0.0:
        most = 0 if abs(value) >= 1_000 else 2 if abs(value) >= 10 else 4
        return min(most, len(repr(value).partition(".")[2]))
    exponent = int(np.floor(np.log10(half)))
    return max(0, (1 if half / 10.0**exponent < 3.55 else 0) - exponent)


def rounded(value: float, half: float = float("nan")) -> str:
    """Text such as "41.4 ± 1.6": `value` and the half width of its interval (see `decimals`)."""
    form = f",.{decimals(value, half)}f"
    return f"{value:{form}}{plus_minus(half, form)}"


def item_half_width(items: Float[np.ndarray, "items statistics"], score: Score) -> float:
    """Half of the 95 % bootstrap interval of the score of one run over other texts."""
    return percentile_half_width(resampled_scores(items[None], score)[:, 0])


def score_runs(items: Items, score: Score) -> Float[np.ndarray, " runs"]:
    """The score of each run on the whole text."""
    return score(items.sum(axis=1))


def resampled_scores(
    items: Items, score: Score, resamples: int = RESAMPLES
) -> Float[np.ndarray, "resamples runs"]:
    """The score of each run on texts made of randomly drawn items.

    The same items are drawn for all runs, and for another call with as many items.
    """
    counts = _draw_counts(items.shape[1], resamples)
    return np.stack([score(counts @ run) for run in items], axis=1)


def over_runs(
    scores: Float[np.ndarray, "resamples runs"], draw: int = 0
) -> Float[np.ndarray, " resamples"]:
    """The mean over randomly drawn runs in each resample; calls with one `draw` draw alike."""
    resamples, runs = scores.shape
    drawn = np.random.default_rng([SEED, draw]).choice(runs, size=(resamples, runs))
    return np.take_along_axis(scores, drawn, axis=1).mean(axis=1)


def bootstrap_p_value(
    a: Float[np.ndarray, "resamples M"], b: Float[np.ndarray, "resamples N"], difference: float
) -> float:
    """The share of resamples in which mean scores are further apart than on average by more than
    `difference`."""
    distances = np.abs(a.mean(axis=1) - b.mean(axis=1))
    return _p_value(distances - distances.mean(), abs(difference))


def randomization_p_value(a: Items, b: Items, score: Score, trials: int = TRIALS) -> float:
    """The share of random exchanges of items after which runs differ by more than `a` and `b` do.

    Run i of `a` exchanges items with run i of `b`.
    """
    runs, items = a.shape[:2]
    exchanged = np.random.default_rng(SEED).integers(2, size=(trials, runs * items), dtype=bool)
    exchanged = exchanged.reshape(trials, runs, items)
    differences = np.zeros(trials)
    for run in range(runs):
        moved = exchanged[:, run].astype(float) @ (a[run] - b[run])
        differences += score(b[run].sum(axis=0) + moved) - score(a[run].sum(axis=0) - moved)
    difference = score_runs(a, score).mean() - score_runs(b, score).mean()
    return _p_value(np.abs(differences) / runs, abs(difference))


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


def ratio(sums: Float[np.ndarray, "resamples 2"]) -> Float[np.ndarray, " resamples"]:
    """The first sum divided by the second."""
    return sums[:, 0] / sums[:, 1]


def exp_ratio(sums: Float[np.ndarray, "resamples 2"]) -> Float[np.ndarray, " resamples"]:
    """The exponential of `ratio`."""
    return np.exp(ratio(sums))


def _corpus_scores(
    metric: Any, sums: Float[np.ndarray, "resamples statistics"]
) -> Float[np.ndarray, " resamples"]:
    return np.array([metric._compute_score_from_stats(row).score for row in sums.tolist()])


def _draw_counts(items: int, resamples: int) -> Float[np.ndarray, "resamples items"]:
    """The number of times that each item is drawn in each resample."""
    drawn = np.random.default_rng(SEED).choice(items, size=(resamples, items))
    rows = np.arange(resamples)[:, None] * items
    counts = np.bincount((drawn + rows).ravel(), minlength=resamples * items)
    return counts.reshape(resamples, items).astype(float)


def _p_value(differences: Float[np.ndarray, " resamples"], observed: float) -> float:
    return float(((differences > observed).sum() + 1) / (len(differences) + 1))
