"""Scores of a language model: likelihood of a text, the user's metrics, intervals."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.harness.runs import distributed
from experiments.harness.runs.bootstrap import item_half_width, ratio
from experiments.harness.runs.rounding import plus_minus
from experiments.harness.runs.sample_tables import write_table
from experiments.harness.training import held_out_loss, metric_inputs
from experiments.harness.training.run_summary import describe_folder
from experiments.language_modelling.objectives import objective_of
from experiments.language_modelling.prepare import (
    Encoded,
    Prepared,
)
from experiments.language_modelling.presets import LanguageConfig
from jaxformer.pretrained import Loaded
from jaxformer.text.data import Mixture
from jaxformer.text.metrics import Likelihood


class Measured(NamedTuple):
    """Measurements of one text, or of several together."""

    likelihood: Likelihood
    losses: list[dict[str, float]]
    """The "loss" in nats and the "tokens" of each batch, one text after the other."""
    scores: dict[str, float]
    """The sums and their quotients; the user's metrics, and the loss of each of several texts."""


def measure(loaded: Loaded, texts: Mapping[str, Encoded], *, stride: int | None = None) -> Measured:
    """The scores of all `texts` together, and of each of several by its name.

    The default stride is the length of a row. Of a causal model every token counts but the first
    of each document (of the whole text, where documents are not separate); of a masked one those
    that are hidden in a fixed way. Raises `ConfigError` for a stride outside 1 to length.
    """
    losses = {name: batch_losses(loaded, text, stride=stride) for name, text in texts.items()}
    likelihoods = {name: total(losses[name], text) for name, text in texts.items()}
    whole = together(likelihoods.values())
    scores = scores_of(loaded.config, whole)
    for name, text in texts.items():
        text_scores = user_metrics(loaded, text, likelihoods[name])
        if len(texts) > 1:
            text_scores |= {"loss": likelihoods[name].loss}
            text_scores = {f"{name}.{metric}": value for metric, value in text_scores.items()}
        scores |= text_scores
    return Measured(whole, list(chain.from_iterable(losses.values())), scores)


def batch_losses(
    loaded: Loaded, text: Encoded, *, stride: int | None = None
) -> list[dict[str, float]]:
    """The "loss" in nats and the "tokens" of each batch of `text`, in rows `stride` apart."""
    config, objective = loaded.config, objective_of(loaded.config)
    apart: int = stride or config.data.seq_len
    batches = objective.iterate_once(text.tokens, loaded.require_tokenizer(), config, apart)
    chunk = config.training.loss_chunk
    return list(held_out_loss.batch_sums(objective.measure, loaded, batches, loss_chunk=chunk))


def total(losses: Sequence[dict[str, float]], text: Encoded) -> Likelihood:
    """The likelihood of `text` from the `losses` of its batches."""
    nats = tokens = 0.0
    for batch in losses:
        nats += batch["loss"]
        tokens += batch["tokens"]
    assert text.amount is not None, "prepare counts the text that is measured"
    return Likelihood(nats, int(tokens), *text.amount)


def together(likelihoods: Iterable[Likelihood]) -> Likelihood:
    """The likelihood of several texts as one."""
    nats, tokens, words, size = map(sum, zip(*likelihoods, strict=True))
    return Likelihood(nats, tokens, words, size)


def user_metrics(loaded: Loaded, text: Encoded, likelihood: Likelihood) -> dict[str, float]:
    """The user's metrics of `text`; see `metric_inputs.user_metrics`."""
    inputs = metric_inputs.MetricInputs(loaded, text, scores_of(loaded.config, likelihood))
    return metric_inputs.user_metrics(loaded.config.training, inputs)


def validation_texts(data: Prepared) -> dict[str, Encoded]:
    """The validation text of each text of a mixture by its name; the only one has the name ""."""
    return {text.name: text.validation for text in data.mixture} or {"": data.validation}


def validation_scores(loaded: Loaded, data: Prepared, step: int) -> dict[str, float]:
    """The scores of the validation text by their names in an evaluation after `step`.

    First `known_scores`, then the user's loss and metrics; of a mixture also each text's loss, and
    how many times it has been read.
    """
    texts = validation_texts(data)
    likelihoods = {name: total(batch_losses(loaded, x), x) for name, x in texts.items()}
    whole = together(likelihoods.values())
    scores = {"validation_loss": whole.loss}
    if "validation_bits_per_byte" in known_scores(loaded.config):
        scores["validation_bits_per_byte"] = whole.bits_per_byte
    for name, text in texts.items():
        text_scores = _user_scores(loaded, text, likelihoods[name])
        if data.mixture:
            text_scores |= {"validation_loss": likelihoods[name].loss}
            text_scores = {
                f"validation_{name}.{metric.removeprefix('validation_')}": value
                for metric, value in text_scores.items()
            }
        scores |= text_scores
    if isinstance(data.batches, Mixture) and step:
        passes = data.batches.passes(step)
        scores |= {f"{name}.passes": value for name, value in passes.items()}
    return scores


def _user_scores(loaded: Loaded, text: Encoded, likelihood: Likelihood) -> dict[str, float]:
    """The user's loss of the validation `text`, in rows as in the training, and metrics."""
    config, objective = loaded.config, objective_of(loaded.config)
    batches = objective.iterate_labelled(
        text.tokens, loaded.require_tokenizer(), config, config.data.seq_len
    )
    loss = metric_inputs.user_loss_metrics(loaded, batches)
    metrics = user_metrics(loaded, text, likelihood)
    return loss | {f"validation_{name}": value for name, value in metrics.items()}


def known_scores(config: LanguageConfig) -> tuple[str, ...]:
    """The scores of each evaluation; early stopping uses the first unless another is named."""
    if config.objective == "causal":
        return "validation_loss", "validation_bits_per_byte"
    return ("validation_loss",)


def scores_of(config: LanguageConfig, likelihood: Likelihood) -> dict[str, float]:
    """The sums and their quotients; of a masked model without words and bytes."""
    names = ["nats", "tokens", "loss", "perplexity"]
    if config.objective == "causal":
        names += ["words", "bytes", "word_perplexity", "bits_per_byte"]
    return {name: getattr(likelihood, name) for name in names}


def write_losses(folder: Path, name: str, losses: Sequence[dict[str, float]]) -> None:
    """Writes samples/NAME-losses.tsv in the run's `folder`: nats and tokens of each batch.

    The first of several processes writes.
    """
    if not distributed.is_first():
        return
    table = {
        "nats": [repr(batch["loss"]) for batch in losses],
        "tokens": [repr(batch["tokens"]) for batch in losses],
    }
    write_table(folder / "samples" / f"{name}-losses.tsv", table)


def describe_scores(name: str, config: LanguageConfig, measured: Measured) -> str:
    """The scores, a line each, with what they are divided by.

    From ten batches on with half of the 95 % bootstrap interval of the loss.
    """
    likelihood = measured.likelihood
    items = np.array([(batch["loss"], batch["tokens"]) for batch in measured.losses])
    interval = item_half_width(items, ratio) if len(items) >= 10 else math.nan
    unit = "hidden tokens" if config.objective == "masked" else "tokens"
    lines = [
        f"{name}: {likelihood.tokens:,} {unit}",
        f"  loss {likelihood.loss:.4f}{plus_minus(interval, '.4f')} nats a token, perplexity "
        f"{_readable(likelihood.perplexity)}",
    ]
    if config.objective == "causal":
        bits = plus_minus(interval * likelihood.bits_per_byte / likelihood.loss, ".4f")
        lines += [
            f"  word perplexity {_readable(likelihood.word_perplexity)} "
            f"(nats / {likelihood.words:,} words, ends of lines among them)",
            f"  bits per byte {likelihood.bits_per_byte:.4f}{bits} ({likelihood.bytes:,} bytes)",
        ]
    if not math.isnan(interval):
        lines.append("  ±: 95 % over other text (bootstrap over batches)")
    return "\n".join(lines)


def _readable(perplexity: float) -> str:
    """A perplexity as a person reads it; an untrained model's may have 25 digits."""
    return f"{perplexity:.2f}" if perplexity < 1e6 else f"{perplexity:.3g}"


def describe_run(folder: Path) -> str:
    """The files of the run in `folder`, and what to do next."""
    files = {"samples/prompts.txt": "the prompts and what the model makes of them"}
    commands = [(f"language_modelling.{name}",) for name in ("generate", "evaluate")]
    return describe_folder(folder, files, commands)
