"""Numbers of runs: their words, which are better, rounding, intervals and tests of scores.

A score is a function of sums over the items of the text (sentences, or batches of windows), so that
it can be computed of a resampled text: `sums` are [resamples, statistics]. With one run on each
side, `bootstrap_p_value` is that of sacreBLEU's `--paired-bs`. Koehn 2004; over several runs Clark
et al. 2011.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxformer import optional_dependencies
from jaxformer.text.metrics import lowercased_tokens, make_bleu

Items = Float[np.ndarray, "runs items statistics"]
Score = Callable[[Float[np.ndarray, "resamples statistics"]], Float[np.ndarray, " resamples"]]

SEED = 12345
"""The seed of sacreBLEU's test."""
RESAMPLES = 1_000


class Quantity(NamedTuple):
    """The words for a number of metrics.jsonl or scores.json: value times `scale` is in `unit`."""

    label: str
    unit: str = ""
    scale: float = 1.0
    better: str = ""
    """"lower" or "higher"; "" for what is no score."""
    log: bool = False
    """Whether a logarithmic axis helps."""


_QUANTITIES = {
    "loss": Quantity("loss", "nats per token", better="lower", log=True),
    "bleu": Quantity("BLEU", better="higher"),
    "chrf": Quantity("chrF", better="higher"),
    "exact": Quantity("exact", "%", 100.0, better="higher"),
    "accuracy": Quantity("accuracy", "%", 100.0, better="higher"),
    "f1": Quantity("F1", better="higher"),
    "rougeLsum": Quantity("ROUGE-Lsum", better="higher"),
    "bits_per_byte": Quantity("bits per byte", better="lower"),
    "perplexity": Quantity("perplexity", "per token", better="lower", log=True),
    "word_perplexity": Quantity("word perplexity", "per word", better="lower", log=True),
    "learning_rate": Quantity("learning rate"),
    "grad_norm": Quantity("gradient norm", log=True),
    "padding": Quantity("padding", "% of positions", 100.0),
    "tokens_per_second": Quantity("speed", "tokens/s"),
    "data_wait": Quantity("wait for a batch", "ms", 1e3),
    "mfu": Quantity("MFU", "% of peak FLOP/s", 100.0),
    "memory": Quantity("memory in use", "GB", 1e-9),
    "memory_peak": Quantity("most memory in use", "GB", 1e-9),
}


def quantity(metric: str) -> Quantity:
    """The words for `metric`, the name of a number in metrics.jsonl or scores.json."""
    prefix, _, last = metric.removeprefix("validation_").rpartition(".")
    better = (x.better for end, x in _QUANTITIES.items() if x.better and last.endswith(end))
    known = _QUANTITIES.get(last, Quantity(last.replace("_", " "), better=next(better, "")))
    words = ["validation"] * metric.startswith("validation_") + [prefix.replace("_", " ")]
    return known._replace(label=" ".join(filter(None, [*words, known.label])))


def shown(value: float) -> str:
    """`value` with four significant digits: 16,140, 0.004240, 6e-05."""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def described(metric: str) -> str:
    """The label of a metric with its unit, and what is better."""
    kind = quantity(metric)
    better = f"{kind.better} is better" if kind.better else ""
    return ", ".join(filter(None, (f"{kind.label} {kind.unit}".strip(), better)))


def described_score(metric: str, value: float) -> str:
    """A score with its name, such as "loss 1.2345", "BLEU 31.42" or "exact 98.2%"."""
    kind = quantity(metric.removeprefix("validation_"))
    if kind.unit == "%":
        return f"{kind.label} {value:.1%}"
    return f"{kind.label} {value:.{2 if kind.better == 'higher' else 4}f}"


def t_half_width(values: Float[np.ndarray, " runs"]) -> float:
    """Half of the 95 % t-interval of the mean of `values`; NaN for fewer than two."""
    return _half_width("ttest_1samp", values, 0.0) if len(values) > 1 else float("nan")


def welch_half_width(a: Float[np.ndarray, " M"], b: Float[np.ndarray, " N"]) -> float:
    """Half of the 95 % interval of the difference of two means; NaN for fewer than two values."""
    if min(len(a), len(b)) < 2:
        return float("nan")
    return _half_width("ttest_ind", a, b, equal_var=False) if a.std() + b.std() else 0.0


def _half_width(test: str, *values: Any, **options: Any) -> float:
    """Half of the 95 % confidence interval of a test of scipy; equal values are no warning."""
    stats: Any = optional_dependencies.load("scipy.stats")  # its import takes a second
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        interval = getattr(stats, test)(*values, **options).confidence_interval()
    return float(interval.high - interval.low) / 2


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
