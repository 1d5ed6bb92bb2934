"""Measure a run: `python -m experiments.language_modelling.evaluate --run RUN [--files F ..]`.

Prints loss, perplexity, word perplexity and bits per byte of the run's test text, or of files;
of a masked run, loss and perplexity of hidden tokens. The last line is the same as JSON.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.harness import cli
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.language_modelling.corpus import part_of
from experiments.language_modelling.evaluation import (
    batch_losses,
    describe_scores,
    loss_interval,
    own_metrics,
    scores_of,
    total,
)
from experiments.language_modelling.load_run import LoadedRun, load_run
from experiments.language_modelling.prepare import Encoded, encode_part, open_encoded, text_digest
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class EvaluateOptions(RunOptions):
    """The run and the text."""

    run: str = "runs/language_modelling/python_stdlib"
    """The folder of the run."""
    files: tuple[str, ...] = ()
    """Files to measure; none: a part of the run's own text."""
    part: Literal["test", "validation", "train"] = "test"
    """The part of the run's own text to measure, without --files."""
    stride: int = 0
    """Tokens between the starts of two sequences; 0: a whole sequence. A smaller stride gives each
    token more context and takes longer."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 0, "stride")


def main(options: EvaluateOptions) -> None:
    """Prints the scores, and as JSON on the last line."""
    loaded = load_run(Path(options.run), options)
    if loaded.config.objective == "masked" and options.stride:
        raise ConfigError("a masked model sees both sides of a token: leave out --stride")
    name = options.part if not options.files else ", ".join(options.files)
    stride = options.stride or loaded.config.data.seq_len
    with tempfile.TemporaryDirectory() as folder:
        text = _text(options, loaded, Path(folder))
        losses = batch_losses(loaded, text, stride=stride)
        found = total(losses, text)
        own = own_metrics(loaded, text, found)
    print(describe_scores(name, loaded.config, found, loss_interval(losses)))
    metadata = {"run": options.run, "text": name, "stride": stride}
    if not options.files:
        metadata["text_sha256"] = text_digest(Path(options.run), name)
    print(json.dumps(metadata | scores_of(loaded.config, found) | own))


def _text(options: EvaluateOptions, loaded: LoadedRun, folder: Path) -> Encoded:
    if not options.files:
        return open_encoded(Path(options.run), options.part, loaded.tokenizer)
    part = part_of(options.files, loaded.config.data)
    assert part is not None  # there are files
    return encode_part(loaded.config, part, loaded.tokenizer, folder / "text.tokens")


if __name__ == "__main__":
    cli.start(main, {"default": EvaluateOptions()}, __doc__)
