"""Runs with a score by a metric, as a function of sums over the items of the test text."""

import json
from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.harness.cli import config_files
from experiments.harness.results.run_samples import table_of_part
from experiments.harness.results.run_settings import seed_of, settings_of
from experiments.harness.results.token_units import TokenUnit, token_unit
from experiments.harness.runs.bootstrap import Score, exp_ratio, ratio
from experiments.harness.runs.run_folder import read_result
from experiments.harness.runs.translation_items import translation_items
from jaxformer.errors import ConfigError, DataError

_DEFAULTS = ("rougeLsum", "bleu", "chrf", "bits_per_byte", "f1", "loss", "accuracy", "exact")
"""The metric of a comparison: the first that the runs have, and that is not alike for all."""
_LIKELIHOODS = {
    "loss": ("tokens", 1.0),
    "perplexity": ("tokens", 1.0),
    "bits_per_byte": ("bytes", log(2.0)),
    "word_perplexity": ("words", 1.0),
}
"""The unit that the nats of a text are divided by, and a factor."""


class ScoredRun(NamedTuple):
    """A run, its score, and the score as a function of sums over the items of the test text.

    `items` is None for a metric that is known of the whole text only. `text` names what was scored,
    `digest` is its SHA-256, and `signature` says how a translation was scored.
    """

    folder: Path
    seed: int
    value: float
    items: Float[np.ndarray, "items statistics"] | None
    score: Score | None
    text: str
    digest: str
    signature: str
    unit: TokenUnit


def main_metric(*scores: Mapping[str, Any]) -> str:
    """The metric that says most of runs with `scores`.

    One that is alike for all of several runs cannot compare them, as BLEU where it is 0: the next
    one does, if it differs.
    """
    shared = [name for name in _DEFAULTS if all(name in each for each in scores)]
    for name in shared:
        if len(scores) == 1 or len({each[name] for each in scores}) > 1:
            return name
    if shared:
        return shared[0]
    return next((name for each in scores for name in _DEFAULTS if name in each), "loss")


def read_scored(folder: Path, metric: str) -> ScoredRun:
    """The finished run in `folder`, scored by `metric`.

    A metric is a number of scores.json, by its dotted name, or the validation's that the weights
    were chosen by, such as validation_bleu. Raises `ConfigError` for a run that is not finished or
    has no such number, `DataError` for samples that do not belong to the score.
    """
    result = read_result(folder)
    if not result.steps:
        raise ConfigError(
            f"{folder} has no weights.json, which says how its weights were chosen: finish its "
            "training first"
        )
    scores, known = result.scores, numbers(result.scores)
    seed, unit = seed_of(folder), token_unit(folder, metric)
    if metric in result.validation:
        value = result.validation[metric]
        return ScoredRun(folder, seed, value, None, None, "validation", "", "", unit)
    if metric not in known:
        names = ", ".join([*known, *result.validation])
        raise ConfigError(f"{folder} has no metric {metric!r}: it has {names}")
    items, score = item_sums(folder, metric, scores) or (None, None)
    if items is not None and score is not None:
        sampled = float(score(items.sum(axis=0)[None])[0])
        if abs(sampled - known[metric]) > 1e-3 * max(1.0, abs(known[metric])):
            raise DataError(
                f"{folder / 'samples'} gives {metric} {sampled:.4f}, but scores.json says "
                f"{known[metric]:.4f}: score the run again"
            )
    return ScoredRun(
        folder=folder,
        seed=seed,
        value=known[metric],
        items=items,
        score=score,
        text=scores["text"],
        digest=scores["text_sha256"],
        signature=json.loads(config_files.flat(scores).get(f"{metric}_signature", '""')),
        unit=unit,
    )


def item_sums(
    folder: Path, metric: str, scores: dict[str, Any]
) -> tuple[Float[np.ndarray, "items statistics"], Score] | None:
    """The sums of each item of the test text, and the score of their sum; None where unknown."""
    table = table_of_part(folder, scores.get("text", ""))
    if metric in _LIKELIHOODS and "nats" in table:
        unit, factor = _LIKELIHOODS[metric]
        nats, tokens = (np.array(table[name], float) for name in ("nats", "tokens"))
        share = tokens * (factor * scores[unit] / scores["tokens"])
        return np.stack([nats, share], axis=1), exp_ratio if "perpl" in metric else ratio
    if "model" not in table:
        return None
    if metric == "accuracy":
        right = np.array(table["model"]) == np.array(table["reference"])
        return np.stack([right, np.ones_like(right)], axis=1).astype(float), ratio
    language = json.loads(settings_of(folder).get("data.target_language", '""'))
    return translation_items(metric, table["model"], table["reference"], language)


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The numbers of scores.json by their dotted names."""
    values = {name: json.loads(text) for name, text in config_files.flat(scores).items()}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not name.startswith(("search.", "translation."))
    }
