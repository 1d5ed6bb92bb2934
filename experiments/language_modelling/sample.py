"""Continue text: `python -m experiments.language_modelling.sample --run RUN --prompt "def "`.

The text is printed while it is made; of several, the first, and then the others with a rule
between them. Equal seeds give equal texts.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments import commands, runs, weights
from experiments.language_modelling.borrowed import is_theirs
from experiments.language_modelling.presets import LanguageConfig
from experiments.language_modelling.reading import read_text
from experiments.language_modelling.showing import RULE
from experiments.language_modelling.trained import load_objective
from jaxformer import generation
from jaxformer.config import ConfigError, check_least
from jaxformer.generation import SamplingConfig
from jaxformer.pretrained import load_ends

_RUN = "runs/language_modelling/python_stdlib"


@dataclass(frozen=True)
class SampleOptions(SamplingConfig):
    """With which run, how (see `SamplingConfig`; the defaults are the run's), and what to continue.

    `prompt` is one text or several; `input` is a file whose whole text is one prompt, "-" for
    standard input; without both, the run's own prompts are taken. Each is continued `count` times.
    `int8`: with weights of 8 bits.
    """

    run: str = _RUN
    prompt: tuple[str, ...] = ()
    input: str = ""
    count: int = 1
    int8: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_least(self, 1, "count")
        if self.prompt and self.input:
            raise ConfigError("give --prompt or --input, not both")


def parse(args: list[str] | None = None) -> SampleOptions:
    """The options of the command line, over those that the run was made with."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--run", default=_RUN)
    folder = finder.parse_known_args(args)[0].run
    default = SampleOptions()
    if (Path(folder) / "config.json").is_file() and not is_theirs(Path(folder)):
        config = runs.load_config(folder, LanguageConfig)
        default = SampleOptions(**asdict(config.sampling), run=folder)
    return commands.parse({"default": default}, args, description=__doc__)


def main(options: SampleOptions) -> None:
    """Prints each prompt and what follows it."""
    trained = load_objective(Path(options.run), "causal", instead="fill_mask")
    trained = weights.in_int8(trained) if options.int8 else trained
    given = (read_text(options.input),) if options.input else options.prompt
    prompts = [p for p in given or trained.config.prompts or ("",) for _ in range(options.count)]
    ends = load_ends(options.run) if is_theirs(Path(options.run)) else None
    texts = generation.stream(
        trained.model, trained.params, prompts, trained.tokenizer, options, ends=ends
    )
    _print(prompts, texts)


def _print(prompts: list[str], pieces: Iterable[tuple[int, str]]) -> None:
    """Prints the first text piece by piece, and the others, which grow beside it, at the end."""
    others = [""] * len(prompts)
    begun = False
    for number, piece in pieces:
        if not begun:  # what cannot be continued is refused before anything is printed
            print(prompts[0], end="", flush=True)
            begun = True
        if number == 0:
            print(piece, end="", flush=True)
        else:
            others[number] += piece
    print("" if begun else prompts[0])
    for prompt, text in list(zip(prompts, others, strict=True))[1:]:
        print(f"{RULE}\n{prompt}{text}")


if __name__ == "__main__":
    sys.exit(commands.run(lambda: main(parse())))
