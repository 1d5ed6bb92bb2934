"""Score a run: `python -m experiments.translation.score --run RUN [--source F --target F]`.

Prints BLEU and chrF of the run's translations against the raw target lines, with sacreBLEU's
signatures; without files, of the run's own test text. With `--forced` prints instead, for each
pair, the log-probability (nats) of the target given the source, and each token's; for a pair
with a blank side an empty line.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.harness import checkpoint_selection, cli
from experiments.harness.checkpoint_selection import RunOptions
from experiments.harness.text_io import write_lines
from experiments.translation import evaluation
from experiments.translation.corpus import Text, load_corpus, read_files
from experiments.translation.load_run import LoadedRun, load_run
from experiments.translation.presets import Files
from jaxformer.config import check_at_least
from jaxformer.errors import DataError
from jaxformer.pipelines import find_too_long, score_pairs


@dataclass(frozen=True)
class ScoreOptions(RunOptions):
    """The run, the text, and which scores."""

    run: str = "runs/translation/grammar"
    """The folder of the run."""
    source: str = ""
    """A file with one source text on each line; empty: the run's own test text."""
    target: str = ""
    """A file with the translation of each line of --source."""
    beam_size: int = 0
    """Beam size; 0: the run's."""
    forced: bool = False
    """Prints the log-probability of each given target instead of translating."""
    lowercased: bool = False
    """Adds BLEU after lower-casing, punctuation normalisation and Moses tokenisation."""
    int8: bool = False
    """Computes with weights of 8 bits."""
    output: str = ""
    """The file that receives the translations; empty: none."""


def main(options: ScoreOptions) -> None:
    """Prints the scores, and as JSON on the last line."""
    check_at_least(options, 0, "beam_size")
    loaded = load_run(Path(options.run), options)
    loaded = checkpoint_selection.in_int8(loaded) if options.int8 else loaded
    text = _text(options, loaded)
    if options.forced:
        _print_forced(loaded, text, options)
        return
    search = loaded.config.search
    search = replace(search, beam_size=options.beam_size or search.beam_size)
    result = evaluation.evaluate(loaded, text, search, lowercased=options.lowercased)
    if options.output:
        write_lines(Path(options.output), result.hypotheses)
    halves = evaluation.half_widths(result.hypotheses, text.target)
    print(evaluation.describe_scores(options.source or "test", result.scores, halves))
    print(json.dumps({"run": options.run, "search": asdict(search), **result.scores}))


def _text(options: ScoreOptions, loaded: LoadedRun) -> Text:
    text = read_files(Files(options.source, options.target))
    if text is not None:
        return text
    corpus = load_corpus(loaded.config.data)
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
