"""How good a language model is, and what it makes of texts."""

from collections.abc import Sequence

from experiments.harness import build
from experiments.harness.text_io import RULE
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.objectives import objective
from experiments.language_modelling.prepare import Encoded
from experiments.language_modelling.presets import LanguageConfig
from jaxformer import pipelines
from jaxformer.text.metrics import Likelihood
from jaxformer.text.tokenizers import Tokenizer


def measure(loaded: LoadedRun, text: Encoded, *, stride: int | None = None) -> Likelihood:
    """The likelihood of the whole of `text`, in rows `stride` (default: their length) apart.

    Of a causal model that is every token but the first of each document (of the whole text,
    where documents are not separate); of a masked one the tokens hidden in a fixed way. Raises
    `ConfigError` for a stride outside 1 to length.
    """
    config, task = loaded.config, objective(loaded.config)
    chunk = config.training.loss_chunk
    stride = stride or config.data.seq_len
    batches = task.iterate_once(text.tokens, loaded.tokenizer, config, stride)
    sums = build.loss_sums(task.measure, loaded.model, loaded.params, batches, loss_chunk=chunk)
    return Likelihood(sums["loss"], int(sums["tokens"]), *text.amount)


def custom_metrics(loaded: LoadedRun, text: Encoded) -> dict[str, float]:
    """`build.custom_metrics` of `text`, in rows as those of the training."""
    config, task = loaded.config, objective(loaded.config)
    batches = task.iterate_labelled(text.tokens, loaded.tokenizer, config, config.data.seq_len)
    chunk = config.training.loss_chunk
    return build.custom_metrics(
        config.training, loaded.model, loaded.params, batches, loss_chunk=chunk
    )


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


def describe_scores(name: str, config: LanguageConfig, found: Likelihood) -> str:
    """The scores, a line each, with what they are divided by."""
    what = "hidden tokens" if config.objective == "masked" else "tokens"
    lines = [
        f"{name}: {found.tokens:,} {what}",
        f"  loss {found.loss:.4f} nats a token, perplexity {found.perplexity:.2f}",
    ]
    if config.objective == "causal":
        lines += [
            f"  word perplexity {found.word_perplexity:.2f} (nats / {found.words:,} words, the "
            "end of each line one of them)",
            f"  bits per byte {found.bits_per_byte:.4f} ({found.bytes:,} bytes)",
        ]
    return "\n".join(lines)


def answer_prompts(loaded: LoadedRun) -> list[str]:
    """What follows each of the run's own prompts: its continuation, or what fills its masks."""
    config = loaded.config
    if config.objective == "masked":
        texts = filled_texts(loaded, config.prompts)
        return [text[len(prompt) :] for prompt, text in zip(config.prompts, texts, strict=True)]
    found = pipelines.complete(
        loaded.model, loaded.params, config.prompts, loaded.tokenizer, config.sampling
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
