"""The scores of finished runs on their test texts, with the sums that a score is made of."""

import json
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments.harness.cli import config_files
from experiments.harness.results.groups import seed_of, settings_of
from experiments.harness.results.statistics import Score, exp_ratio, ratio, translation_items
from experiments.harness.runs.checkpoint_selection import read_result
from experiments.harness.runs.run_folder import Run
from experiments.harness.runs.text_io import lines_digest, read_table
from jaxformer.errors import ConfigError, DataError

_DEFAULTS = ("bleu", "bits_per_byte", "loss")
"""The metric of a comparison: the first that the runs have."""
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
    unit: str
    """The number of tokens of the text, for scores per token; else ""."""
    steps: list[int]
    """The steps whose mean are the weights."""


def default_metric(folder: Path) -> str:
    """The metric by which runs like that in `folder` are compared."""
    scores = read_result(folder).scores
    return next((name for name in _DEFAULTS if name in scores), "loss")


def read_scored(folder: Path, metric: str) -> ScoredRun:
    """The finished run in `folder`, scored by `metric`.

    A metric is a number of scores.json, by its dotted name, or one of the validation. The weights
    are those that the validation chose. Raises `ConfigError` for a run that is not finished or has
    no such number, `DataError` for samples that are not those of the score.
    """
    result = read_result(folder)
    if not result.steps:
        raise ConfigError(
            f"{folder} has no weights.json, which says how its weights were chosen: finish its "
            "training first"
        )
    known = numbers(result.scores) | _validation_scores(folder, result.validation)
    if metric not in known:
        raise ConfigError(f"{folder} has no metric {metric!r}: it has {', '.join(known)}")
    validation = metric.startswith("validation_")
    sums = None if validation else item_sums(folder, metric, result.scores)
    items, score = sums or (None, None)
    if items is not None and score is not None:
        sampled = float(score(items.sum(axis=0)[None])[0])
        if abs(sampled - known[metric]) > 1e-3 * max(1.0, abs(known[metric])):
            raise DataError(
                f"{folder / 'samples'} gives {metric} {sampled:.4f}, but scores.json says "
                f"{known[metric]:.4f}: score the run again"
            )
    text = "validation" if validation else result.scores["text"]
    per_token = "bytes" in result.scores and metric in ("loss", "perplexity")
    return ScoredRun(
        folder=folder,
        seed=seed_of(folder),
        value=known[metric],
        items=items,
        score=score,
        text=text,
        digest=_text_digest(folder, text, result.scores),
        signature=json.loads(config_files.flat(result.scores).get(f"{metric}_signature", '""')),
        unit=str(result.scores["tokens"]) if per_token else "",
        steps=result.steps,
    )


def _text_digest(folder: Path, text: str, scores: dict[str, Any]) -> str:
    """SHA-256 (hex) of all lines of both sides, or of the text of a language model; "": unknown."""
    if text == scores["text"] and "text_sha256" in scores:
        return scores["text_sha256"]
    table = _table(folder, text)
    return lines_digest(table["source"], table["reference"]) if "source" in table else ""


def item_sums(
    folder: Path, metric: str, scores: dict[str, Any]
) -> tuple[Float[np.ndarray, "items statistics"], Score] | None:
    """The sums of each item of the test text, and the score of their sum; None where unknown."""
    table = _table(folder, scores.get("text", ""))
    if metric in _LIKELIHOODS and "nats" in table:
        unit, factor = _LIKELIHOODS[metric]
        nats, tokens = (np.array(table[name], float) for name in ("nats", "tokens"))
        share = tokens * (factor * scores[unit] / scores["tokens"])
        return np.stack([nats, share], axis=1), exp_ratio if "perpl" in metric else ratio
    if "model" not in table:
        return None
    language = json.loads(settings_of(folder).get("data.target_language", '""'))
    return translation_items(metric, table["model"], table["reference"], language)


def sample_table(folder: Path) -> dict[str, list[str]]:
    """The samples of the text that the run in `folder` was scored on; {} where it has none."""
    path = folder / "scores.json"
    return _table(folder, read_result(folder).scores["text"]) if path.is_file() else {}


def _table(folder: Path, text: str) -> dict[str, list[str]]:
    """The columns of the samples of the part `text`; {} where there are none."""
    for name in (text, f"{text}-losses"):
        path = folder / "samples" / f"{name}.tsv"
        if path.is_file():
            return read_table(path)
    return {}


def numbers(scores: dict[str, Any]) -> dict[str, float]:
    """The numbers of scores.json by their dotted names."""
    values = {name: json.loads(text) for name, text in config_files.flat(scores).items()}
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not name.startswith("search.")
    }


def _validation_scores(folder: Path, chosen: dict[str, float]) -> dict[str, float]:
    """The scores of the best evaluation, and over them those of the chosen weights."""
    lines = sorted(reversed(Run(folder).metrics()), key=_quality)
    best = {name: float(x[name]) for x in lines for name in x if name.startswith("validation_")}
    return best | chosen


def _quality(line: dict[str, float]) -> float:
    return line.get("validation_bleu", -line.get("validation_loss", 0.0))
