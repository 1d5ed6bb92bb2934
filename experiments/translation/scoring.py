"""Scores of a translator: BLEU, chrF or ROUGE, and losses."""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from experiments.harness.training import held_out_loss, metric_inputs
from experiments.translation.corpus import Text, fingerprint
from experiments.translation.prepare import sides
from experiments.translation.presets import TranslationConfig
from experiments.translation.telling_scores import telling_scores
from jaxformer import optional_dependencies
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.errors import DataError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import find_too_long, translate_with_details
from jaxformer.pipelines.translation import source_ids
from jaxformer.pretrained import Loaded
from jaxformer.text import metrics
from jaxformer.text.data import PairBatch, Tokens, bucket_pairs
from jaxformer.training.losses import seq2seq_loss

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Result(NamedTuple):
    """A translated text and its scores: BLEU, chrF, signatures, share exactly right.

    A score that the text gives to every translation alike is left out (`telling_scores`).
    """

    scores: dict[str, Any]
    hypotheses: list[str]


def evaluate(
    loaded: Loaded,
    text: Text,
    search: SearchConfig,
    *,
    language: str = "",
    tokenize: str | None = None,
    lowercased: bool = False,
) -> Result:
    """The best translation of each source line of `text`, scored against its raw target lines.

    `language` is the language of the target lines (empty: the run's), `tokenize` as in
    `score_translations`. With `lowercased` also after lower-casing, punctuation normalisation and
    Moses tokenisation. A run's own metrics come last. A line of more than `max_len` tokens gets an
    empty translation, and a warning on stderr; a run whose sources are cut is scored so, too.
    """
    config = loaded.config
    length = 0
    if config is not None:
        language = language or config.data.target_language
        length = config.data.source_len
    lines, blanked = prepare_sources(loaded, text.source, length)
    if blanked:
        print(f"warning: {describe_too_long(loaded.model, blanked)}", file=sys.stderr)
    translations = translate_with_details(loaded, lines, search)
    hypotheses = [best[0].text for best in translations]
    scores = score_hypotheses(hypotheses, text.target, language, tokenize, lowercased=lowercased)
    if config is not None:
        inputs = metric_inputs.MetricInputs(loaded, text, scores, hypotheses)
        scores |= metric_inputs.user_metrics(config.training, inputs)
    return Result(scores, hypotheses)


def score_hypotheses(
    hypotheses: Sequence[str],
    references: Sequence[str],
    language: str = "",
    tokenize: str | None = None,
    *,
    lowercased: bool = False,
) -> dict[str, Any]:
    """BLEU and chrF with their signatures, and the share exactly right; only `telling_scores`.

    With `lowercased` also `metrics.score_lowercased`, under this name.
    """
    telling = telling_scores(references, language, tokenize)
    scores = _only(metrics.score_translations(hypotheses, references, language, tokenize), telling)
    scores["exact"] = metrics.exact_match(hypotheses, references)
    if lowercased:
        lower = metrics.score_lowercased(hypotheses, references, language)
        scores["lowercased"] = _only(lower, telling)
    return scores


def _only(scores: metrics.Scores, telling: Sequence[str]) -> dict[str, Any]:
    """`scores` without BLEU or chrF, and its signature, where it is not among the `telling`."""
    silent = {"bleu", "chrf"} - set(telling)
    return {
        name: value
        for name, value in scores._asdict().items()
        if name.removesuffix("_signature") not in silent
    }


def score_summaries(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (0 to 100): the mean F1 over the texts, of stemmed words.

    `rougeL` takes a text as one sequence of words, `rougeLsum` each of its lines. Needs the package
    `rouge-score` (extra finetuning). Raises `DataError` for different numbers of texts, or none,
    and for references without one letter a to z or digit, the only ones that ROUGE counts.
    Lin 2004.
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"{len(hypotheses)} summaries and {len(references)} references: give one reference for "
            "each summary, and at least one"
        )
    if not any(re.search("[a-z0-9]", line.lower()) for line in references):
        raise DataError(
            "ROUGE counts words of the letters a to z and digits alone, and no reference has one: "
            "its score would be 0 for every summary; use chrF (validation_chrf)"
        )
    scorer = optional_dependencies.load("rouge_score.rouge_scorer").RougeScorer(
        ROUGE, use_stemmer=True
    )
    pairs = zip(references, hypotheses, strict=True)
    scores = [scorer.score(reference, hypothesis) for reference, hypothesis in pairs]
    return {
        name: 100.0 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE
    }


def search_of(loaded: Loaded) -> tuple[SearchConfig, TranslationOptions]:
    """The search for translations that the `settings` of a model say."""
    search, options = loaded.choose_settings((), {}, SearchConfig, TranslationOptions)
    return search, options


def losses(loaded: Loaded, text: Text) -> dict[str, float]:
    """`validation_loss` of `text`: nats per target token, without label smoothing.

    With your own loss also `metric_inputs.user_loss_metrics`. Pairs with an empty or too long side
    are left out; {} if no other is there.
    """
    training = loaded.config.training
    batches = _batches(loaded, text)
    if not batches:
        return {}
    pad = loaded.config.translation.pad
    sums = held_out_loss.loss_sums(
        seq2seq_loss, loaded, batches, pad=pad, loss_chunk=training.loss_chunk
    )
    custom = metric_inputs.user_loss_metrics(
        loaded, batches, label_smoothing=training.label_smoothing, arguments={"pad": pad}
    )
    return {"validation_loss": sums["loss"] / sums["tokens"], **custom}


def _batches(loaded: Loaded, text: Text) -> list[PairBatch]:
    """The pairs of `text` once, in at most two shapes of `batch_tokens` target positions."""
    config = loaded.config
    (source, target), special = sides(
        config, loaded.require_tokenizer(), loaded.require_target_tokenizer()
    )
    try:
        pairs = bucket_pairs(
            Tokens.from_lists(source.encode_batch(text.source)),
            Tokens.from_lists(target.encode_batch(text.target)),
            seed=config.training.seed,
            batch_tokens=max(config.data.batch_tokens // config.training.parts, 1),
            buckets=2,
            max_len=config.model.max_len,
            pad_to_multiple=config.data.pad_to_multiple,
            special=special,
        )
    except DataError:  # no pair is left
        return []
    return [pairs.batch(step) for step in range(pairs.steps_per_epoch)]


def prepare_sources(
    loaded: Loaded, lines: Sequence[str], length: int = 0
) -> tuple[list[str], list[int]]:
    """`lines` as the model can read them, and the numbers, from 1, of those made blank.

    A line is cut after `length` tokens, unless that is 0; a line that is too long
    then is made blank.
    """
    search, options = search_of(loaded)
    tokenizer = loaded.require_tokenizer()
    if length:
        length = min(length, loaded.model.config.max_len)

        def cut(line: str, ids: list[int]) -> str:
            if len(ids) <= length:
                return line
            bare = replace(options, prefix="")
            (line_ids,) = source_ids([line], tokenizer, search, bare)
            return tokenizer.decode(line_ids[: length - 1 - len(ids) + len(line_ids)])

        rows = source_ids(lines, tokenizer, search, options)
        lines = [cut(line, ids) for line, ids in zip(lines, rows, strict=True)]
    long = set(find_too_long(loaded.model, lines, tokenizer, search, options))
    return ["" if i in long else line for i, line in enumerate(lines)], [i + 1 for i in long]


def describe_too_long(model: EncoderDecoder, numbers: list[int]) -> str:
    """A sentence about the lines `numbers`, which were made blank."""
    numbers = sorted(numbers)
    named = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
    limit = model.config.max_len
    return (
        f"{len(numbers)} of the lines have more than the model's max_len={limit} tokens and were "
        f"given empty translations (line {named}): split them"
    )


def check_extras(config: TranslationConfig) -> None:
    """Raises `MissingExtra` for a package that scoring needs at the end of the run."""
    needed = ["sacrebleu"]
    if config.data.corpus == "multi30k":
        needed.append("sacremoses")
    for name in needed:
        optional_dependencies.load(name)


def facts_to_repeat(config: TranslationConfig, name: str, text: Text) -> dict[str, Any]:
    """The text called `name` and the settings that its scores depend on."""
    return {
        "text": name,
        "text_sha256": fingerprint(text),
        "search": asdict(config.search),
        "translation": asdict(config.translation),
    }
