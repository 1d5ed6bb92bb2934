"""Measure a run: `python -m experiments.language_modelling.evaluate --run RUN [--files F ..]`.

Prints loss, perplexity, word perplexity and bits per byte of the run's test text, or of files;
of a masked run, loss and perplexity of hidden tokens. The last line is the same as JSON.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from experiments.harness import cli
from experiments.harness.runs import distributed
from experiments.harness.runs.run_options import RunOptions
from experiments.language_modelling.corpus import part_of
from experiments.language_modelling.id_text import is_ids
from experiments.language_modelling.load_run import load_run
from experiments.language_modelling.prepare import (
    describe_unknown,
    encode_part,
    open_encoded,
    part_names,
    text_digest,
)
from experiments.language_modelling.scoring import describe_scores, measure
from jaxformer.config import Natural
from jaxformer.distributed import assert_processes_agree
from jaxformer.errors import ConfigError


@dataclass(frozen=True)
class EvaluateOptions(RunOptions):
    """The run and the text."""

    run: str = "runs/language_modelling/python_stdlib"
    """The folder of the run."""
    files: tuple[str, ...] = ()
    """Files to measure; none: a part of the run's own text."""
    document_id: Natural | None = None
    """The id between two documents where --files are ids (.bin, .npy); None: the run's."""
    part: Literal["test", "validation", "train"] = "test"
    """The part of the run's own text to measure, without --files."""
    stride: Natural = 0
    """Tokens between the starts of two sequences; 0: a whole sequence. A smaller stride gives each
    token more context and takes longer."""

    def without_effect(self) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their names."""
        return {"part": "--files give the text"} if self.files else {}


@distributed.joins
def main(options: EvaluateOptions) -> None:
    """Prints the scores, and as JSON on the last line."""
    loaded = load_run(options.folder, options)
    config, tokenizer = loaded.config, loaded.require_tokenizer()
    if config.objective == "masked" and options.stride:
        raise ConfigError("a masked model sees both sides of a token: leave out --stride")
    name = options.part if not options.files else ", ".join(options.files)
    stride = options.stride or config.data.seq_len
    if options.document_id is not None and not is_ids(options.files):
        raise ConfigError(
            f"document_id={options.document_id} is for --files of ids (.bin, .npy): leave it out"
        )
    with tempfile.TemporaryDirectory() as folder:
        if options.files:
            with distributed.together():
                data = config.data
                if options.document_id is not None:
                    data = replace(data, document_id=options.document_id)
                part = part_of(options.files, data)
                assert part is not None  # there are files
                text = encode_part(config, part, tokenizer, Path(folder) / "text.tokens")
            assert_processes_agree({f"the file {name}": text.tokens.fingerprint})
            texts = {"": text}
        elif task := getattr(config, "task", None):
            raise ConfigError(
                f"{options.run} learned a task from examples ({task.kind}), and its scores are "
                "in its scores.json: give --files to measure the likelihood of their text"
            )
        else:
            texts = {
                part_name: open_encoded(options.folder, part_name, tokenizer)
                for part_name in part_names(config.data, options.part)
            }
        texts = {name: text.counted(tokenizer) for name, text in texts.items()}
        measured = measure(loaded, texts, stride=stride)
        unknown = [describe_unknown(text, tokenizer) for text in texts.values()]
    print(describe_scores(name, config, measured))
    for line in filter(None, unknown):
        print(f"  {line}")
    metadata = {"run": options.run, "text": name, "stride": stride}
    if not options.files:
        names = part_names(config.data, options.part)
        metadata["text_sha256"] = text_digest(options.folder, names)
    print(json.dumps(metadata | measured.scores))


if __name__ == "__main__":
    cli.start(main, {"default": EvaluateOptions()}, __doc__)
