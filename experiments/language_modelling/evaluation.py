"""How good a language model is, and what it makes of texts."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.harness.results.scored_runs import ratio
from experiments.harness.results.statistics import item_half_width, plus_minus
from experiments.harness.runs.text_io import RULE, write_table
from experiments.harness.training import build
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.prepare import Encoded
from experiments.language_modelling.presets import LanguageConfig
from jaxformer import pipelines
from jaxformer.text.metrics import Likelihood
from jaxformer.text.tokenizers import Tokenizer


def measure(loaded: LoadedRun, text: Encoded, *, stride: int | None = None) -> Likelihood:
    """The likelihood of the whole of `text`: the sum of `batch_losses`."""
    return total(batch_losses(loaded, text, stride=stride), text)


def batch_losses(
    loaded: LoadedRun, text: Encoded, *, stride: int | None = None
) -> list[dict[str, float]]:
    """The "loss" in nats and the "tokens" of each batch of `text`, in rows `stride` apart.

    The default stride is the length of a row. Of a causal model every token counts but the first
    of each document (of the whole text, where documents are not separate); of a masked one those
    that are hidden in a fixed way. Raises `ConfigError` for a stride outside 1 to length.
    """
    config, task = loaded.config, objective(loaded.config)
    chunk = config.training.loss_chunk
    stride = stride or config.data.seq_len
    batches = task.iterate_once(text.tokens, loaded.tokenizer, config, stride)
    return list(
        build.batch_sums(task.measure, loaded.model, loaded.params, batches, loss_chunk=chunk)
    )


def total(losses: Sequence[dict[str, float]], text: Encoded) -> Likelihood:
    """The likelihood of `text` from the `losses` of its batches."""
    nats = tokens = 0.0
    for batch in losses:
        nats += batch["loss"]
        tokens += batch["tokens"]
    return Likelihood(nats, int(tokens), *text.amount)


def loss_interval(losses: Sequence[dict[str, float]]) -> float:
    """Half of the 95 % bootstrap interval of the loss over batches; NaN for fewer than ten."""
    if len(losses) < 10:
        return float("nan")
    return item_half_width(np.array([(x["loss"], x["tokens"]) for x in losses]), ratio)


def write_losses(folder: Path, name: str, losses: Sequence[dict[str, float]]) -> None:
    """Writes samples/NAME-losses.tsv in the run's `folder`: nats and tokens of each batch."""
    columns = {"nats": "loss", "tokens": "tokens"}
    table = {title: [repr(batch[key]) for batch in losses] for title, key in columns.items()}
    write_table(folder / "samples" / f"{name}-losses.tsv", table)


def custom_metrics(loaded: LoadedRun, text: Encoded, found: Likelihood) -> dict[str, float]:
    """What your own loss and metrics say of the validation `text`, whose likelihood is `found`.

    The loss is computed in rows as those of the training (see `build.custom_metrics`).
    """
    config, task = loaded.config, objective(loaded.config)
    batches = task.iterate_labelled(text.tokens, loaded.tokenizer, config, config.data.seq_len)
    chunk = config.training.loss_chunk
    of_loss = build.custom_metrics(
        config.training, loaded.model, loaded.params, batches, loss_chunk=chunk
    )
    own = own_metrics(loaded, text, found)
    return of_loss | {f"validation_{name}": value for name, value in own.items()}


def own_metrics(loaded: LoadedRun, text: Encoded, found: Likelihood) -> dict[str, float]:
    """`build.own_metrics` of `text`, of which `found` is the likelihood."""
    evaluation = build.Evaluation(loaded, text, scores_of(loaded.config, found))
    return build.own_metrics(loaded.config.training, evaluation)


def scores_of(config: LanguageConfig, found: Likelihood) -> dict[str, float]:
    """The sums and what they say; a masked model's say nothing of words and bytes."""
    scores = {"nats": found.nats, "tokens": found.tokens}
    scores |= {"loss": found.loss, "perplexity": found.perplexity}
    if config.objective == "masked":
        return scores
    scores |= {"words": found.words, "bytes": found.bytes}
    return scores | {
        "word_perplexity": found.word_perplexity,
        "bits_per_byte": found.bits_per_byte,
    }


def describe_scores(
    name: str, config: LanguageConfig, found: Likelihood, interval: float = float("nan")
) -> str:
    """The scores, a line each, with what they are divided by.

    `interval` is half of the 95 % interval of the loss; NaN where it is not known.
    """
    what = "hidden tokens" if config.objective == "masked" else "tokens"
    lines = [
        f"{name}: {found.tokens:,} {what}",
        f"  loss {found.loss:.4f}{plus_minus(interval, '.4f')} nats a token, perplexity "
        f"{found.perplexity:.2f}",
    ]
    if config.objective == "causal":
        bits = plus_minus(interval * found.bits_per_byte / found.loss, ".4f")
        lines += [
            f"  word perplexity {found.word_perplexity:.2f} (nats / {found.words:,} words, the "
            "end of each line one of them)",
            f"  bits per byte {found.bits_per_byte:.4f}{bits} ({found.bytes:,} bytes)",
        ]
    if not math.isnan(interval):
        lines.append("  ±: 95 % over other text (bootstrap over batches)")
    return "\n".join(lines)


def answer_prompts(loaded: LoadedRun) -> list[str]:
    """What follows each of the run's own prompts: its continuation, or what fills its masks."""
    config = loaded.config
    if config.objective == "masked":
        texts = filled_texts(loaded, config.prompts)
        return [text[len(prompt) :] for prompt, text in zip(config.prompts, texts, strict=True)]
    settings = config.sampling, config.completion
    found = pipelines.complete(
        loaded.model, loaded.params, config.prompts, loaded.tokenizer, *settings
    )
    return [best.text for best in found]


def join_samples(prompts: Sequence[str], answers: Sequence[str]) -> str:
    """Each prompt and what follows it, with a rule between them."""
    texts = (prompt + answer for prompt, answer in zip(prompts, answers, strict=True))
    return f"\n{RULE}\n".join(texts)


def split_samples(text: str, prompts: Sequence[str]) -> list[str] | None:
    """The answers in a text of `join_samples`; None if it was made of other prompts."""
    texts = text.split(f"\n{RULE}\n")
    pairs = list(zip(prompts, texts, strict=False))
    if len(texts) != len(prompts) or not all(text.startswith(prompt) for prompt, text in pairs):
        return None
    return [text[len(prompt) :] for prompt, text in pairs]


def filled_texts(loaded: LoadedRun, texts: Sequence[str], *, count: int = 5) -> list[str]:
    """Each text, and below it a line for each of its masks: the `count` best tokens in percent."""
    found = pipelines.fill_mask(loaded.model, loaded.params, texts, loaded.tokenizer, count=count)
    return [
        "\n".join([text, *(_mask_line(i, best, loaded) for i, best in enumerate(masks, start=1))])
        for text, masks in zip(texts, found, strict=True)
    ]


def _mask_line(
    number: int, candidates: Sequence[pipelines.MaskPrediction], loaded: LoadedRun
) -> str:
    texts = (token_text(candidate.token, loaded.tokenizer) for candidate in candidates)
    found = zip(texts, candidates, strict=True)
    return f"  {number}: " + "  ".join(f"{text!r} {best.probability:.1%}" for text, best in found)


def token_text(token: str, tokenizer: Tokenizer) -> str:
    """The token's text, or its name where it is not text, such as a part of a character."""
    index = tokenizer.id_of(token)
    text = "" if index is None else tokenizer.decode([index])
    if token[0] in "Ġ▁" and text != token:  # decoding drops the space before the first word
        text = " " + text.removeprefix(" ")
    return token if text == "" or "\ufffd" in text else text
