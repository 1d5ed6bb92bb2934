"""Score a model: `python -m experiments.translation.evaluate --run RUN [--source F --target F]`.

Prints BLEU and chrF of its translations against the raw target lines, with sacreBLEU's signatures,
and the run's own metrics; without files, of the run's own test text. With `--forced` prints
instead, for each pair, the log-probability (nats) of the target given the source, and each token's;
for a pair with a blank side an empty line.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from experiments.harness import cli
from experiments.harness.runs import distributed
from experiments.harness.runs.decoding_options import DecodingOptions, load_members
from experiments.harness.runs.sample_tables import write_lines
from experiments.harness.runs.shared_inputs import check_shared, described_lines
from experiments.harness.runs.text_io import check_output
from experiments.harness.training import metric_inputs
from experiments.harness.training.training_config import text_cache
from experiments.translation.corpus import (
    Text,
    as_trained,
    fingerprint,
    open_corpus,
    read_files,
)
from experiments.translation.language_codes import describe_word_counting
from experiments.translation.load_run import load_decoding
from experiments.translation.presets import Files
from experiments.translation.score_report import describe_scores
from experiments.translation.scoring import evaluate, score_summaries, search_of
from jaxformer.errors import ConfigError, DataError
from jaxformer.pipelines import find_too_long, score_pairs
from jaxformer.pretrained import Loaded


@dataclass(frozen=True)
class EvaluateOptions(DecodingOptions):
    """The run, the text, and which scores."""

    run: str = "runs/translation/grammar"
    """The folder of a run, or of a translation model as transformers writes it; several folders,
    separated by commas, are scored as one ensemble."""
    source: str = ""
    """A file with one source text on each line; empty: the run's own test text."""
    target: str = ""
    """A file with the translation of each line of --source."""
    forced: bool = False
    """Prints the log-probability of each given target instead of translating."""
    language: str = ""
    """Code of the language of the target text, which chooses the words that BLEU counts (zh, ja and
    ko have tokenizers of their own); empty: --target_language, or the run's."""
    tokenize: str | None = None
    """sacreBLEU's tokenizer for BLEU, such as zh, char, intl or flores200; None: the
    language's."""
    lowercased: bool = False
    """Adds BLEU after lower-casing, punctuation normalisation and Moses tokenisation."""
    int8: bool = False
    """Computes with weights of 8 bits."""
    output: str = ""
    """The file that receives the translations; empty: none."""

    def without_effect(self) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their names."""
        if not self.forced:
            counts = "--tokenize says which words BLEU counts"
            return {"language": counts} if self.tokenize and not self.lowercased else {}
        return dict.fromkeys(_OF_SEARCH_AND_SCORES, "--forced neither translates nor scores")


_OF_SEARCH_AND_SCORES = (
    "language",
    "tokenize",
    "lowercased",
    "output",
    "beam_size",
    "length_penalty",
    "no_repeat_ngram_size",
    "repetition_penalty",
)
"""Options that no log-probability of a given target depends on."""


@distributed.joins
def main(options: EvaluateOptions) -> None:
    """Prints the scores, and as JSON on the last line."""
    check_output(options.output, options.source, options.target)
    load = partial(load_decoding, options=options)
    loaded = load_members(load, options.run, int8=options.int8)
    check_shared(lambda: {"the text": described_lines(*_text(options, loaded))})
    text = _text(options, loaded)
    if options.forced:
        _print_forced(loaded, text, options)
        return
    search, translation = search_of(loaded)
    language = options.language or options.target_language or ""
    if loaded.config is not None and not language:
        language = loaded.config.data.target_language
    words = language, options.tokenize
    if strange := describe_word_counting(*words):
        print(f"warning: language={strange}, or --tokenize", file=sys.stderr)
    if options.lowercased and not language:
        raise ConfigError("lowercased=True needs the language of the target text: give --language")
    result = evaluate(
        loaded,
        text,
        search,
        language=language,
        tokenize=options.tokenize,
        lowercased=options.lowercased,
    )
    if options.output and distributed.is_first():
        write_lines(options.output, result.hypotheses)
    name = options.source or "test"
    print(describe_scores(name, result.scores, result.hypotheses, text.target, *words))
    record: dict[str, Any] = {"run": options.run, "text_sha256": fingerprint(text)}
    record |= {"search": asdict(search), "translation": asdict(translation)}
    print(json.dumps(record | result.scores))


def rouge(evaluation: metric_inputs.MetricInputs) -> dict[str, float]:
    """ROUGE of the summaries of a text; for --training.metrics."""
    return score_summaries(evaluation.hypotheses, evaluation.text.target)


def _text(options: EvaluateOptions, loaded: Loaded) -> Text:
    text = read_files(Files(options.source, options.target))
    if text is not None and not any(a.strip() and b.strip() for a, b in zip(*text, strict=True)):
        raise DataError(
            f"{options.source} and {options.target} have no line with a text on both sides: there "
            "is nothing to score"
        )
    if loaded.config is None:
        if text is None:
            raise ConfigError(
                f"{options.run} is a folder of transformers, which has no test text: give --source "
                "and --target"
            )
        return text
    if text is not None:
        return as_trained(text, loaded.config.data)
    try:
        corpus = open_corpus(loaded.config.data, text_cache(loaded.config))
    except DataError as error:
        raise DataError(
            f"{error}. The run's own text is needed without --source and --target: give these, or "
            "bring it back"
        ) from error
    return corpus.test if corpus.test.source else corpus.validation


def _print_forced(loaded: Loaded, text: Text, options: EvaluateOptions) -> None:
    names = options.source or "the source", options.target or "the target"
    search, translation = search_of(loaded)
    sides = (
        (loaded.require_tokenizer(), translation),
        (loaded.require_target_tokenizer(), replace(translation, prefix="")),
    )
    for name, lines, (tokenizer, settings) in zip(names, text, sides, strict=True):
        long = find_too_long(loaded.model, lines, tokenizer, search, settings)
        if long:
            limit = loaded.model.config.max_len
            raise DataError(
                f"{name}:{long[0] + 1}: the line has more than the model's max_len={limit} tokens, "
                f"as {len(long)} lines of {len(lines)} have: split or leave out these pairs"
            )
    pairs = list(zip(*text, strict=True))
    for log_probs in score_pairs(loaded, pairs):
        numbers = " ".join(f"{x:.4f}" for x in log_probs)
        print(f"{sum(log_probs):.4f}\t{numbers}" if log_probs else "")


if __name__ == "__main__":
    cli.start(main, {"default": EvaluateOptions()}, __doc__)
