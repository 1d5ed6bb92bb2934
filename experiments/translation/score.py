"""Score a run: `python -m experiments.translation.score --run RUN [--source F --target F]`.

Prints BLEU and chrF of the run's translations against the raw target lines, with sacreBLEU's
signatures; without files, of the run's own test text. With `--forced` prints instead, for each
pair, the log-probability (nats) of the target given the source, and each token's; for a pair
with a blank side an empty line.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments import commands, weights
from experiments.translation import evaluation
from experiments.translation.corpus import Text, load_corpus, read_files
from experiments.translation.presets import Files
from experiments.translation.trained import Trained, load_trained
from experiments.writing import write_lines
from jaxformer.config import check_least
from jaxformer.data import DataError
from jaxformer.generation import score_pairs, too_long


@dataclass(frozen=True)
class ScoreOptions:
    """Which run, which text, and how: `width` 0 keeps the run's beam width.

    `lowercased` adds BLEU after lower-casing, punctuation normalisation and Moses tokenisation.
    `output` receives the translations. `int8`: with weights of 8 bits.
    """

    run: str = "runs/translation/grammar"
    source: str = ""
    target: str = ""
    width: int = 0
    forced: bool = False
    lowercased: bool = False
    int8: bool = False
    output: str = ""


def main(options: ScoreOptions) -> None:
    """Prints the scores, and as JSON on the last line."""
    check_least(options, 0, "width")
    trained = load_trained(Path(options.run))
    trained = weights.in_int8(trained) if options.int8 else trained
    text = _text(options, trained)
    if options.forced:
        _print_forced(trained, text, options)
        return
    search = trained.config.search
    search = replace(search, width=options.width or search.width)
    result = evaluation.evaluate(trained, text, search, lowercased=options.lowercased)
    if options.output:
        write_lines(Path(options.output), result.hypotheses)
    print(evaluation.describe_scores(options.source or "test", result.scores))
    print(json.dumps({"run": options.run, "search": asdict(search), **result.scores}))


def _text(options: ScoreOptions, trained: Trained) -> Text:
    text = read_files(Files(options.source, options.target))
    if text is not None:
        return text
    corpus = load_corpus(trained.config.data)
    return corpus.test if corpus.test.source else corpus.validation


def _print_forced(trained: Trained, text: Text, options: ScoreOptions) -> None:
    names = options.source or "the source", options.target or "the target"
    for name, lines, tokenizer in zip(names, text, trained[3:], strict=True):
        long = too_long(trained.model, lines, tokenizer)
        if long:
            limit = trained.config.model.max_len
            raise DataError(
                f"{name}:{long[0] + 1}: the line has more than the model's max_len={limit} tokens, "
                f"as {len(long)} lines of {len(lines)} have: split or leave out these pairs"
            )
    pairs = list(zip(*text, strict=True))
    for log_probs in score_pairs(*trained[1:3], pairs, *trained[3:]):
        numbers = " ".join(f"{x:.4f}" for x in log_probs)
        print(f"{sum(log_probs):.4f}\t{numbers}" if log_probs else "")


if __name__ == "__main__":
    options = {"default": ScoreOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
