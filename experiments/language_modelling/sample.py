"""Continue text: `python -m experiments.language_modelling.sample --run RUN --prompt "def "`.

The first text is printed while it is made; the others follow it, with a rule between them. Equal
seeds give equal texts. On a terminal the prompt is bold, and without one it asks for it.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from experiments.harness import cli
from experiments.harness.runs import run_folder, text_io
from experiments.harness.runs.checkpoint_selection import RunOptions
from experiments.harness.runs.decoding_options import load_members, run_folders
from experiments.harness.runs.text_io import RULE, read_text
from experiments.language_modelling.chat_templates import check_messages, load_template
from experiments.language_modelling.load_run import LoadedRun, load_objective
from experiments.language_modelling.presets import LanguageConfig
from jaxformer import pipelines
from jaxformer.config import check_at_least
from jaxformer.decoding import SamplingConfig
from jaxformer.decoding.pipeline_options import CompletionOptions
from jaxformer.errors import ConfigError
from jaxformer.nn.ensemble import EnsembleMean
from jaxformer.pretrained import is_pretrained, load_eos

_RUN = "runs/language_modelling/python_stdlib"


@dataclass(frozen=True)
class SampleOptions(SamplingConfig, CompletionOptions, RunOptions):
    """The run, the prompts, and how they are continued; by default as the run says."""

    run: str = _RUN
    """The folder of a causal run, or of pretrained weights; several folders, separated by commas,
    write as one ensemble."""
    prompt: tuple[str, ...] = ()
    """The texts to continue; without them and `input`, asks on a terminal, or uses the run's."""
    input: str = ""
    """A file whose whole text is one prompt; "-" is standard input."""
    count: int = 1
    """Continuations of each prompt."""
    ensemble: EnsembleMean = "arithmetic"
    """Of several runs, the mean of probabilities (arithmetic) or of their logarithms."""
    chat: bool = False
    """Takes each prompt for a user's message, and writes the assistant's answer, as the chat
    template of the folder says."""
    int8: bool = False
    """Computes with weights of 8 bits."""

    def __post_init__(self):
        super().__post_init__()
        CompletionOptions.__post_init__(self)
        RunOptions.__post_init__(self)
        check_at_least(self, 1, "count")
        if self.prompt and self.input:
            raise ConfigError("give --prompt or --input, not both")

    @property
    def settings(self) -> tuple[SamplingConfig, CompletionOptions]:
        """How the prompts are continued."""
        values = [
            {field.name: getattr(self, field.name) for field in fields(kind)}
            for kind in (SamplingConfig, CompletionOptions)
        ]
        return SamplingConfig(**values[0]), CompletionOptions(**values[1])


def parse(args: list[str] | None = None) -> SampleOptions:
    """The options of the command line, over those that the run was made with."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--run", default=_RUN)
    run = finder.parse_known_args(args)[0].run
    folder, default = str(run_folders(run)[0]), SampleOptions()
    if (Path(folder) / "config.json").is_file() and not is_pretrained(Path(folder)):
        config = run_folder.load_config(folder, LanguageConfig)
        settings = asdict(config.sampling) | asdict(config.completion)
        default = SampleOptions(**settings, run=run)
    return cli.parse({"default": default}, args, description=__doc__)


def main(options: SampleOptions) -> None:
    """Prints each prompt and what follows it."""
    loaded = load_members(
        lambda folder: load_objective(folder, "causal", "fill_mask", options),
        options.run,
        options.ensemble,
        int8=options.int8,
    )
    folder = run_folders(options.run)[0]
    if options.eos is None and is_pretrained(folder):
        options = replace(options, eos=load_eos(folder))
    given = (read_text(options.input),) if options.input else options.prompt
    if given or not text_io.is_interactive():
        _continue(loaded, options, given or loaded.config.prompts or ("",))
    else:
        text_io.answer_lines("a text to continue", lambda line: _continue(loaded, options, (line,)))


def _continue(loaded: LoadedRun, options: SampleOptions, given: tuple[str, ...]) -> None:
    prompts = [prompt for prompt in given for _ in range(options.count)]
    asked = chat_ids(prompts, loaded, options) if options.chat else prompts
    system = loaded.model, loaded.params, asked, loaded.tokenizer
    texts = pipelines.stream(*system, *options.settings)
    print_texts([f"{prompt}\n" for prompt in prompts] if options.chat else prompts, texts)


def chat_ids(messages: list[str], loaded: LoadedRun, options: SampleOptions) -> list[list[int]]:
    """The ids that ask for the assistant's answer to each message of a user."""
    template = load_template(run_folders(options.run)[0], loaded.tokenizer)
    check_messages(messages, loaded.tokenizer)
    asked = ([{"role": "user", "content": message}] for message in messages)
    texts = [template.render(each, add_generation_prompt=True) for each in asked]
    return [ids for ids, _ in loaded.tokenizer.encode_with_special(texts)]


def print_texts(prompts: list[str], pieces: Iterable[tuple[int, str]]) -> None:
    """Prints the first text piece by piece, and the others at the end."""
    others = [""] * len(prompts)
    begun = False
    for number, piece in pieces:
        if not begun:  # what cannot be continued is refused before anything is printed
            print(text_io.bold(prompts[0]), end="", flush=True)
            begun = True
        if number == 0:
            print(piece, end="", flush=True)
        else:
            others[number] += piece
    print("" if begun else text_io.bold(prompts[0]))
    for prompt, text in list(zip(prompts, others, strict=True))[1:]:
        print(f"{RULE}\n{text_io.bold(prompt)}{text}")


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(parse())))
