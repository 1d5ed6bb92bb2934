"""Scores of a translator: BLEU, chrF or ROUGE, losses, samples, and what is said of them."""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.runs import distributed
from experiments.harness.runs.sample_tables import read_table, write_table
from experiments.harness.training import held_out_loss, metric_inputs
from experiments.harness.training.open_run import OpenRun
from experiments.harness.training.run_summary import describe_folder
from experiments.harness.training.samples import Sample
from experiments.translation.corpus import (
    Text,
    fingerprint,
    read_known_words,
)
from experiments.translation.prepare import sides
from experiments.translation.presets import TranslationConfig
from jaxformer import optional_dependencies
from jaxformer.decoding import SearchConfig, TranslationOptions
from jaxformer.errors import DataError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import find_too_long, translate
from jaxformer.pipelines.translation import source_ids
from jaxformer.pretrained import Loaded
from jaxformer.text import metrics
from jaxformer.text.data import PairBatch, Tokens, bucket_pairs
from jaxformer.training.losses import seq2seq_loss

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Result(NamedTuple):
    """A translated text and its scores: BLEU, chrF, signatures, share exactly right."""

    scores: dict
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

    `language` is that of the target lines (empty: the run's), `tokenize` as in
    `score_translations`. With `lowercased` also after lower-casing, punctuation normalisation and
    Moses tokenisation. A run's own metrics come last. A line of more than `max_len` tokens gets an
    empty translation, and a warning on stderr; a run whose sources are cut is scored so, too.
    """
    config, length = loaded.config, 0
    if config is not None:
        language, length = language or config.data.target_language, config.data.source_len
    lines, blanked = prepare_sources(loaded, text.source, length)
    if blanked:
        print(f"warning: {describe_too_long(loaded.model, blanked)}", file=sys.stderr)
    translations = translate(loaded, lines, search, details=True)
    hypotheses = [best[0].text for best in translations]
    scores: dict[str, Any]
    scores = metrics.score_translations(hypotheses, text.target, language, tokenize)._asdict()
    scores["exact"] = metrics.exact_match(hypotheses, text.target)
    if lowercased:
        lower = metrics.score_lowercased(hypotheses, text.target, language)
        scores |= {"lowercased": lower._asdict()}
    if config is not None:
        inputs = metric_inputs.MetricInputs(loaded, text, scores, hypotheses)
        scores |= metric_inputs.user_metrics(config.training, inputs)
    return Result(scores, hypotheses)


def score_summaries(hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L (0 to 100): the mean F1 over the texts, of stemmed words.

    `rougeL` takes a text as one sequence of words, `rougeLsum` each of its lines. Needs the package
    `rouge-score` (extra finetuning). Raises `DataError` for different numbers of texts, or none.
    Lin 2004.
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"{len(hypotheses)} summaries and {len(references)} references: give one reference for "
            "each summary, and at least one"
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
    options = {"pad": loaded.config.translation.pad, "loss_chunk": training.loss_chunk}
    sums = held_out_loss.loss_sums(seq2seq_loss, loaded, batches, **options)
    smoothed = options | {"label_smoothing": training.label_smoothing}
    custom = metric_inputs.user_loss_metrics(loaded, batches, **smoothed)
    return {"validation_loss": sums["loss"] / sums["tokens"], **custom}


def _batches(loaded: Loaded, text: Text) -> list[PairBatch]:
    """The pairs of `text` once, in at most two shapes of `batch_tokens` target positions."""
    config = loaded.config
    (source, target), special = sides(config, loaded.tokenizer, loaded.target_tokenizer)
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

    What follows `length` tokens of a line is cut off, unless that is 0; a line that is too long
    then is made blank.
    """
    search, options = search_of(loaded)
    if length:
        length = min(length, loaded.model.config.max_len)

        def cut(line: str, ids: list[int]) -> str:
            if len(ids) <= length:
                return line
            bare = replace(options, prefix="")
            (own,) = source_ids([line], loaded.tokenizer, search, bare)
            return loaded.tokenizer.decode(own[: length - 1 - len(ids) + len(own)])

        rows = source_ids(lines, loaded.tokenizer, search, options)
        lines = [cut(line, ids) for line, ids in zip(lines, rows, strict=True)]
    long = set(find_too_long(loaded.model, lines, loaded.tokenizer, search, options))
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


def chosen_samples(text: Text, hypotheses: list[str]) -> list[Sample]:
    """Three sentences with their translations: a short, a middle and a long one, always the same.

    Fewer where `text` has fewer.
    """
    by_length = sorted(range(len(text.source)), key=lambda i: len(text.source[i]))
    chosen = dict.fromkeys(by_length[len(by_length) * k // 4] for k in (1, 2, 3) if by_length)
    return [Sample(text.source[i], hypotheses[i], text.target[i]) for i in chosen]


def write_samples(folder: Path, name: str, text: Text, hypotheses: list[str]) -> None:
    """Writes samples/NAME.tsv in the run's `folder`; of several processes the first one does."""
    if not distributed.is_first():
        return
    columns = {"source": text.source, "model": hypotheses, "reference": text.target}
    write_table(folder / "samples" / f"{name}.tsv", columns)


def read_samples(folder: Path) -> dict[str, list[str]]:
    """Source, model and reference of the text that the run was scored on; {} where it was not."""
    for name in ("test", "validation"):
        path = folder / "samples" / f"{name}.tsv"
        if path.is_file():
            return read_table(path)
    return {}


def describe_scores(
    name: str,
    scores: dict,
    hypotheses: list[str],
    references: list[str],
    language: str = "",
    tokenize: str | None = None,
) -> str:
    """The scores, a line each, with signatures and 95 % intervals."""
    from experiments.harness.runs.bootstrap import item_half_width
    from experiments.harness.runs.rounding import plus_minus
    from experiments.harness.runs.translation_items import translation_items

    halves = {}
    for metric, form in (("exact", ".1%"), ("bleu", ".2f"), ("chrf", ".2f")):
        items = translation_items(metric, hypotheses, references, language, tokenize)
        halves[metric] = plus_minus(item_half_width(*items), form) if items else ""
    lines = [
        f"{name}: {scores['sentences']:,} sentences, {scores['exact']:.1%}{halves['exact']} "
        "exactly right",
        f"  BLEU {scores['bleu']:.2f}{halves['bleu']}  {scores['bleu_signature']}",
        f"  chrF {scores['chrf']:.2f}{halves['chrf']}  {scores['chrf_signature']}",
        "  ±: 95 % over other sentences (bootstrap)",
    ]
    if "lowercased" in scores:
        lower = scores["lowercased"]
        lines.append(f"  BLEU {lower['bleu']:.2f}  {lower['bleu_signature']}")
    if "rouge1" in scores:
        means = ", ".join(f"{x.replace('rouge', 'ROUGE-')} {scores[x]:.2f}" for x in ROUGE)
        lines.append(f"  {means}")
    return "\n".join(lines)


def facts_to_repeat(config: TranslationConfig, name: str, text: Text) -> dict[str, Any]:
    """The text called `name` and the settings that its scores depend on."""
    return {
        "text": name,
        "text_sha256": fingerprint(text),
        "search": asdict(config.search),
        "translation": asdict(config.translation),
    }


def describe_run(run: OpenRun, name: str, text: Text, scores: dict, hypotheses: list[str]) -> str:
    """The last lines of a training: the `scores` of the text `name`, and what to do next."""
    words = read_known_words(run.folder)
    limits = (
        f"Its training text has {len(words):,} words in the source language. Sentences with other "
        "words, or of another kind, may be translated less well."
    )
    abilities = "The model has learned to translate sentences like the three above. " + limits
    if scores["bleu"] < 10:
        abilities = "The model has not learned to translate yet: give it more steps or more text."
    elif scores["bleu"] < 30:
        abilities = "The model translates in part: more steps or more text would help. " + limits
    if run.config.init_from:
        abilities = ""  # other text taught the model more
    files = {f"samples/{name}.tsv": "source, model and reference of each sentence"}
    commands = [("translation.translate",)]
    language = run.config.data.target_language
    described = describe_scores(name, scores, hypotheses, text.target, language)
    folder_and_next = describe_folder(run.folder, files, commands)
    paragraphs = described, textwrap.fill(abilities, width=80), folder_and_next
    return "\n\n".join(filter(None, paragraphs))
