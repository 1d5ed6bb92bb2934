"""How good a translation model is: scores of a text, and lines that are too long for it."""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.harness.results.scored_runs import translation_items
from experiments.harness.results.statistics import item_half_width, plus_minus
from experiments.harness.runs.decoding_options import DecodingOptions
from experiments.harness.runs.text_io import read_table, write_table
from experiments.harness.training import build
from experiments.harness.training.training_view import Sample
from experiments.translation.corpus import Text
from experiments.translation.load_run import LoadedRun, Translator
from experiments.translation.presets import TranslationConfig
from experiments.translation.summary_scores import score_summaries
from jaxformer import optional_dependencies
from jaxformer.decoding import SearchConfig
from jaxformer.decoding.pipeline_options import TranslationOptions
from jaxformer.errors import DataError
from jaxformer.nn.models import EncoderDecoder
from jaxformer.pipelines import find_too_long
from jaxformer.pipelines.batching import pad_right
from jaxformer.text import metrics
from jaxformer.text.data import PairBatch, Tokens, bucket_pairs
from jaxformer.text.tokenizers import BOS, EOS, PAD
from jaxformer.training.losses import seq2seq_loss


class Result(NamedTuple):
    """A translated text and its scores: BLEU, chrF, signatures, share exactly right."""

    scores: dict
    hypotheses: list[str]


def evaluate(
    loaded: LoadedRun,
    text: Text,
    search: SearchConfig,
    *,
    lowercased: bool,
    decoding: DecodingOptions = DecodingOptions(),
) -> Result:
    """The best translation of each source line of `text`, scored against its raw target lines.

    `decoding` says whether it is searched, with `search`, or drawn.
    With `lowercased` also after lower-casing, punctuation normalisation and Moses tokenisation.
    A line of more than `max_len` tokens gets an empty translation, and a warning on stderr.
    """
    lines, blanked = without_too_long(loaded, text.source)
    if blanked:
        print(f"warning: {describe_too_long(loaded.model, blanked)}", file=sys.stderr)
    found = Translator(*loaded[1:], search, loaded.config.translation, decoding)(lines)
    hypotheses = [best[0].text for best in found]
    scores = metrics.score_translations(hypotheses, text.target)._asdict()
    scores["exact"] = metrics.exact_match(hypotheses, text.target)
    if lowercased:
        language = loaded.config.data.target_language
        lower = metrics.score_lowercased(hypotheses, text.target, language)
        scores["lowercased"] = lower._asdict()
    return Result(scores, hypotheses)


def rouge(evaluation: build.Evaluation) -> dict[str, float]:
    """ROUGE of the summaries of a text; for --training.metrics."""
    return score_summaries(evaluation.hypotheses, evaluation.text.target)


def losses(loaded: LoadedRun, text: Text) -> dict[str, float]:
    """`validation_loss` of `text`: nats per target token, without label smoothing.

    With your own loss also `build.custom_metrics`. Pairs with an empty or too long side are left
    out; {} if no other is there.
    """
    training = loaded.config.training
    batches = _batches(loaded, text)
    if not batches:
        return {}
    options = {"pad": PAD, "loss_chunk": training.loss_chunk}
    sums = build.loss_sums(seq2seq_loss, loaded.model, loaded.params, batches, **options)
    smoothing = training.label_smoothing
    custom = build.custom_metrics(
        training, loaded.model, loaded.params, batches, label_smoothing=smoothing, **options
    )
    return {"validation_loss": sums["loss"] / sums["tokens"], **custom}


def _batches(loaded: LoadedRun, text: Text) -> list[PairBatch]:
    """The pairs of `text` once, in at most two shapes of `batch_tokens` target positions."""
    config = loaded.config
    try:
        found = bucket_pairs(
            Tokens.from_lists(loaded.source_tokenizer.encode_batch(text.source)),
            Tokens.from_lists(loaded.target_tokenizer.encode_batch(text.target)),
            seed=config.training.seed,
            batch_tokens=max(config.data.batch_tokens // config.training.grad_accumulation, 1),
            buckets=2,
            max_len=config.model.max_len,
            pad_to_multiple=config.data.pad_to_multiple,
        )
    except DataError:  # no pair is left
        return []
    return [found.batch(step) for step in range(found.steps_per_epoch)]


def without_too_long(
    loaded: LoadedRun | Translator,
    lines: list[str],
    search: SearchConfig = SearchConfig(),
    options: TranslationOptions = TranslationOptions(),
) -> tuple[list[str], list[int]]:
    """`lines` with the too long ones made blank, and the numbers of those, from 1."""
    long = set(find_too_long(loaded.model, lines, loaded.source_tokenizer, search, options))
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
    for name in ["sacrebleu"] + ["sacremoses"] * (config.data.corpus == "multi30k"):
        optional_dependencies.load(name)


def chosen_samples(text: Text, hypotheses: list[str]) -> list[Sample]:
    """Three sentences with their translations: a short, a middle and a long one, always the same.

    Fewer where `text` has fewer.
    """
    by_length = sorted(range(len(text.source)), key=lambda i: len(text.source[i]))
    chosen = dict.fromkeys(by_length[len(by_length) * k // 4] for k in (1, 2, 3) if by_length)
    return [Sample(text.source[i], hypotheses[i], text.target[i]) for i in chosen]


def write_samples(folder: Path, name: str, text: Text, hypotheses: list[str]) -> None:
    """Writes samples/NAME.tsv in the run's `folder`."""
    columns = {"source": text.source, "model": hypotheses, "reference": text.target}
    write_table(folder / "samples" / f"{name}.tsv", columns)


def half_widths(hypotheses: list[str], references: list[str]) -> dict[str, float]:
    """Halves of the 95 % bootstrap intervals, over sentences, of BLEU, chrF and `exact`."""
    names = ("bleu", "chrf", "exact")
    found = {name: translation_items(name, hypotheses, references) for name in names}
    return {name: item_half_width(*items) for name, items in found.items() if items}


def describe_each(scores: dict, halves: dict[str, float]) -> tuple[str, str, str]:
    """The share of exact translations, BLEU and chrF, with their intervals (see `half_widths`)."""
    return (
        f"{scores['exact']:.1%}{plus_minus(halves['exact'], '.1%')} exactly right",
        f"BLEU {scores['bleu']:.2f}{plus_minus(halves['bleu'], '.2f')}",
        f"chrF {scores['chrf']:.2f}{plus_minus(halves['chrf'], '.2f')}",
    )


def describe_scores(name: str, scores: dict, halves: dict[str, float]) -> str:
    """The scores with their intervals (see `half_widths`) and signatures, a line each."""
    exact, bleu, chrf = describe_each(scores, halves)
    lines = [
        f"{name}: {scores['sentences']} sentences, {exact}",
        f"  {bleu}  {scores['bleu_signature']}",
        f"  {chrf}  {scores['chrf_signature']}",
        "  ±: 95 % over other sentences (bootstrap)",
    ]
    if "lowercased" in scores:
        lower = scores["lowercased"]
        lines.append(f"  BLEU {lower['bleu']:.2f}  {lower['bleu_signature']}")
    return "\n".join(lines)


def read_samples(folder: Path) -> dict[str, list[str]]:
    """Source, model and reference of the text that the run was scored on; {} where it was not."""
    for name in ("test", "validation"):
        path = folder / "samples" / f"{name}.tsv"
        if path.is_file():
            return read_table(path)
    return {}


def scored_text(folder: Path) -> Text:
    """The sources and references that the run in `folder` was scored on.

    Raises `DataError` for a run that was not.
    """
    samples = read_samples(folder)
    if not samples:
        raise DataError(f"{folder} has no samples of a text it was scored on: finish its training")
    return Text(samples["source"], samples["reference"])


def pair_batch(loaded: LoadedRun, text: Text, count: int) -> PairBatch:
    """The first `count` pairs of `text` in one batch; what exceeds the model's `max_len` is cut."""
    longest = loaded.model.config.max_len
    sources, targets = (
        [ids[: longest - 1] for ids in tokenizer.encode_batch(lines[:count])]
        for tokenizer, lines in zip(loaded[3:], text, strict=True)
    )
    sides = [[*ids, EOS] for ids in sources], [[BOS, *ids, EOS] for ids in targets]
    source, target = (pad_right(side, len(side), max(map(len, side))) for side in sides)
    return PairBatch(source, target, np.arange(len(source), dtype=np.int32))
