"""Fill in: `python -m experiments.language_modelling.fill_mask --run RUN --text "He <mask> it ."`.

Each text is printed, and below it the best tokens for each of its masks.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from experiments import commands
from experiments.language_modelling.reading import texts_of
from experiments.language_modelling.showing import filled
from experiments.language_modelling.trained import load_objective
from jaxformer.config import check_least


@dataclass(frozen=True)
class FillMaskOptions:
    """With which masked run, what (texts, or a file of one a line, "-" for standard input).

    The mask is written as the run's vocabulary does: <mask>, or [MASK]. `count` tokens are shown.
    """

    run: str = "runs/language_modelling/bert_tiny"
    text: tuple[str, ...] = ()
    input: str = ""
    count: int = 5

    def __post_init__(self):
        check_least(self, 1, "count")


def main(options: FillMaskOptions) -> None:
    """Prints the texts and what fills them."""
    trained = load_objective(Path(options.run), "masked", instead="sample")
    texts = texts_of(options.text, options.input)
    print("\n".join(filled(trained, texts, count=options.count)))


if __name__ == "__main__":
    options = {"default": FillMaskOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
