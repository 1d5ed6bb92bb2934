"""Fill in: `python -m experiments.language_modelling.fill_mask --run RUN --text "He <mask> it ."`.

Each text is printed, and below it the best tokens for each of its masks. On a terminal, without a
text, it asks for one.
"""

from dataclasses import dataclass
from pathlib import Path

from experiments.harness import cli
from experiments.harness.runs import text_io
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.text_io import read_texts
from experiments.language_modelling.evaluation import filled_texts
from experiments.language_modelling.load_run import load_objective
from jaxformer.config import check_at_least


@dataclass(frozen=True)
class FillMaskOptions(RunOptions):
    """The run and the texts."""

    run: str = "runs/language_modelling/bert_tiny"
    """The folder of a masked run, or of pretrained weights."""
    text: tuple[str, ...] = ()
    """The texts; their masks are written as in the vocabulary: <mask>, or [MASK]."""
    input: str = ""
    """A file of one text a line; "-" is standard input."""
    count: int = 5
    """Tokens to show for each mask."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 1, "count")


def main(options: FillMaskOptions) -> None:
    """Prints the texts and what fills them."""
    loaded = load_objective(Path(options.run), "masked", "sample", options)

    def fill(texts: tuple[str, ...]) -> None:
        print("\n".join(filled_texts(loaded, texts, count=options.count)))

    if options.text or options.input or not text_io.is_interactive():
        fill(read_texts(options.text, options.input))
    else:
        mask = loaded.tokenizer.special.mask
        name = "<mask>" if mask is None else loaded.tokenizer.token(mask)
        text_io.answer_lines(f"a text with {name} in it", lambda line: fill((line,)))


if __name__ == "__main__":
    cli.start(main, {"default": FillMaskOptions()}, __doc__)
