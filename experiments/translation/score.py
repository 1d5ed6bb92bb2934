"""Score a run: `python -m experiments.translation.score --run RUN [--source F --target F]`.

Prints BLEU and chrF of the run's translations against the raw target lines, with sacreBLEU's
signatures; without files, of the run's own test text. With `--forced` prints instead, for each
pair, the log-probability (nats) of the target given the source, and each token's; for a pair
with a blank side an empty line.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.harness import cli
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.decoding_options import DecodingOptions, load_members
from experiments.harness.runs.text_io import write_lines
from experiments.harness.training import build
from experiments.harness.training.training_config import text_cache
from experiments.translation import evaluation
from experiments.translation.corpus import Text, as_trained, fingerprint, open_corpus, read_files
from experiments.translation.load_run import LoadedRun, load_run
from experiments.translation.presets import Files
from jaxformer.errors import DataError
from jaxformer.pipelines import find_too_long, score_pairs


@dataclass(frozen=True)
class ScoreOptions(DecodingOptions, RunOptions):
    """The run, the text, and which scores."""

    run: str = "runs/translation/grammar"
    """The folder of the run; several folders, separated by commas, are scored as one ensemble."""
    source: str = ""
    """A file with one source text on each line; empty: the run's own test text."""
    target: str = ""
    """A file with the translation of each line of --source."""
    forced: bool = False
    """Prints the log-probability of each given target instead of translating."""
    lowercased: bool = False
    """Adds BLEU after lower-casing, punctuation normalisation and Moses tokenisation."""
    int8: bool = False
    """Computes with weights of 8 bits."""
    output: str = ""
    """The file that receives the translations; empty: none."""

    def __post_init__(self):
        super().__post_init__()
        RunOptions.__post_init__(self)


def main(options: ScoreOptions) -> None:
    """Prints the scores, and as JSON on the last line."""
    loaded = load_members(
        lambda folder: load_run(folder, options), options.run, options.ensemble, int8=options.int8
    )
    text = _text(options, loaded)
    if options.forced:
        _print_forced(loaded, text, options)
        return
    search = options.search(loaded.config.search)
    result = evaluation.evaluate(
        loaded, text, search, lowercased=options.lowercased, decoding=options
    )
    if options.output:
        write_lines(Path(options.output), result.hypotheses)
    halves = evaluation.half_widths(result.hypotheses, text.target)
    print(evaluation.describe_scores(options.source or "test", result.scores, halves))
    record: dict[str, Any] = {"run": options.run, "text_sha256": fingerprint(text)}
    record |= {"search": asdict(search), "translation": asdict(loaded.config.translation)}
    if options.decoding != "beam":
        drawn = {"samples": options.mbr_samples, "utility": options.utility}
        how = {"decoding": options.decoding, **(drawn if options.decoding == "mbr" else {})}
        sampler = asdict(options.sampler) | {"seed": options.seed}
        record |= how | {"sampler": sampler}
    own = build.own_metrics(loaded.config.training, build.Evaluation(loaded, text, *result))
    print(json.dumps(record | result.scores | own))


def _text(options: ScoreOptions, loaded: LoadedRun) -> Text:
    text = read_files(Files(options.source, options.target))
    if text is not None:
        return as_trained(text, loaded.config.data)
    corpus = open_corpus(loaded.config.data, text_cache(loaded.config))
    return corpus.test if corpus.test.source else corpus.validation


def _print_forced(loaded: LoadedRun, text: Text, options: ScoreOptions) -> None:
    names = options.source or "the source", options.target or "the target"
    for name, lines, tokenizer in zip(names, text, loaded[3:], strict=True):
        long = find_too_long(loaded.model, lines, tokenizer)
        if long:
            limit = loaded.config.model.max_len
            raise DataError(
                f"{name}:{long[0] + 1}: the line has more than the model's max_len={limit} tokens, "
                f"as {len(long)} lines of {len(lines)} have: split or leave out these pairs"
            )
    pairs = list(zip(*text, strict=True))
    for log_probs in score_pairs(*loaded[1:3], pairs, *loaded[3:]):
        numbers = " ".join(f"{x:.4f}" for x in log_probs)
        print(f"{sum(log_probs):.4f}\t{numbers}" if log_probs else "")


if __name__ == "__main__":
    cli.start(main, {"default": ScoreOptions()}, __doc__)
