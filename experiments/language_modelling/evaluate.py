"""Measure a run: `python -m experiments.language_modelling.evaluate --run RUN [--files F ..]`.

Prints loss, perplexity, word perplexity and bits per byte of the run's test text, or of files;
of a masked run, loss and perplexity of hidden tokens. The last line is the same as JSON.
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments import commands
from experiments.language_modelling.corpus import part_of
from experiments.language_modelling.evaluation import describe_scores, measure, scores_of
from experiments.language_modelling.prepare import Encoded, encode_part, open_encoded
from experiments.language_modelling.trained import Trained, load_trained
from jaxformer.config import ConfigError, check_least, check_names


@dataclass(frozen=True)
class EvaluateOptions:
    """Which run, and which text: a part of the run's own, or files.

    `stride`: how many tokens after the last one a row begins; below the length of a row each
    token has at least their difference before it, and the work grows. 0 is a whole row.
    """

    run: str = "runs/language_modelling/python_stdlib"
    files: tuple[str, ...] = ()
    part: Literal["test", "validation", "train"] = "test"
    stride: int = 0

    def __post_init__(self):
        check_names(self)
        check_least(self, 0, "stride")


def main(options: EvaluateOptions) -> None:
    """Prints the scores, and as JSON on the last line."""
    trained = load_trained(Path(options.run))
    if trained.config.objective == "masked" and options.stride:
        raise ConfigError("a masked model sees both sides of a token: leave out --stride")
    name = options.part if not options.files else ", ".join(options.files)
    stride = options.stride or trained.config.data.length
    with tempfile.TemporaryDirectory() as folder:
        text = _text(options, trained, Path(folder))
        found = measure(trained, text, stride=stride)
    print(describe_scores(name, trained.config, found))
    facts = {"run": options.run, "text": name, "stride": stride}
    print(json.dumps(facts | scores_of(trained.config, found)))


def _text(options: EvaluateOptions, trained: Trained, folder: Path) -> Encoded:
    if not options.files:
        return open_encoded(Path(options.run), options.part, trained.tokenizer)
    part = part_of(options.files, trained.config.data.split)
    return encode_part(trained.config, part, trained.tokenizer, folder / "text.tokens")


if __name__ == "__main__":
    options = {"default": EvaluateOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
