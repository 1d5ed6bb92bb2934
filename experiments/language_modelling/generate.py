"""Continue or fill in texts: `python -m experiments.language_modelling.generate --run RUN`.

A causal run continues each `--text`; the first text is printed while it is made, and the others
follow with a rule between them. A masked run fills in the masks of each text (<mask>, [MASK]):
below it stand the best tokens for each mask. On a terminal, without a text, the command asks for
one.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from experiments.harness import cli
from experiments.harness.cli import config_files, display
from experiments.harness.runs import distributed, text_io
from experiments.harness.runs.decoding_options import load_members, run_folders
from experiments.harness.runs.run_options import RunOptions
from experiments.harness.runs.shared_inputs import check_shared_files
from experiments.harness.runs.text_io import check_holds_lines, read_text, read_texts
from experiments.language_modelling.load_run import load_run
from experiments.language_modelling.presets import GREEDY, OF_DRAWING
from experiments.language_modelling.prompts import filled_texts
from experiments.language_modelling.tasks.chat_template import check_messages, find_template
from jaxformer import pipelines
from jaxformer.config import Natural, from_plain
from jaxformer.decoding import CompletionOptions, SamplingConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import EncoderOnly
from jaxformer.pretrained import Loaded, is_pretrained, load_sampling_config, open_folder

_RUN = "runs/language_modelling/python_stdlib"


@dataclass(frozen=True)
class GenerateOptions(SamplingConfig, CompletionOptions, RunOptions):
    """The run, the texts, and how they are continued; by default as the run says."""

    run: str = _RUN
    """The folder of a run, or of pretrained weights; several folders, separated by commas, write as
    one ensemble."""
    text: tuple[str, ...] = ()
    """The texts; without them and `input`, asks on a terminal, or uses the run's prompts."""
    input: str = ""
    """A file with one text; of a masked run, with a text on each line. "-" is standard input."""
    count: Natural = 0
    """Continuations of each text, or tokens shown for each mask; 0: 1 continuation, 5 tokens."""
    chat: bool = False
    """Takes each text for a user's message, and writes the assistant's answer, as the chat template
    of the folder says."""
    int8: bool = False
    """Computes with weights of 8 bits."""

    def __post_init__(self):
        super().__post_init__()
        CompletionOptions.__post_init__(self)
        if self.text and self.input:
            raise ConfigError("give --text or --input, not both")

    def without_effect(self) -> dict[str, str]:
        """Reasons why options change nothing with the other settings, by their names."""
        return {} if self.temperature else dict.fromkeys((*OF_DRAWING, "seed"), GREEDY)

    @property
    def settings(self) -> tuple[SamplingConfig, CompletionOptions]:
        """Settings of continuing the texts."""
        sampling, completion = (
            {field.name: getattr(self, field.name) for field in fields(kind)}
            for kind in (SamplingConfig, CompletionOptions)
        )
        return SamplingConfig(**sampling), CompletionOptions(**completion)


def parse(args: list[str] | None = None) -> GenerateOptions:
    """The options of the command line, over the options that the run was made with."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--run", default=_RUN)
    run = finder.parse_known_args(args)[0].run
    folder = run_folders(run)[0]
    default = GenerateOptions()
    is_masked = False
    if is_pretrained(folder):
        is_masked = isinstance(open_folder(folder).model(), MaskedLanguageModel)
        default = GenerateOptions(**_fields(*load_sampling_config(folder)), run=run)
    elif (folder / "config.json").is_file():
        content = config_files.read_object(folder)
        is_masked = content.get("objective") == "masked"
        kinds = {"sampling": SamplingConfig, "completion": CompletionOptions}
        parts = (from_plain(kind, content.get(name, {}), name) for name, kind in kinds.items())
        default = GenerateOptions(**_fields(*parts), run=run)
    options = cli.parse({"default": default}, args, description=__doc__)
    if is_masked and (options.chat or options.settings != default.settings):
        raise ConfigError(
            f"{run} is a masked model, which fills in words and continues no text: leave out "
            "--chat and the settings of sampling"
        )
    return options


def _fields(*parts: Any) -> dict[str, Any]:
    return {name: value for part in parts for name, value in vars(part).items()}


@distributed.joins
def main(options: GenerateOptions) -> None:
    """Prints the texts and what the model makes of them."""
    loaded = load_members(lambda folder: load_run(folder, options), options.run, int8=options.int8)
    is_masked = loaded.config.objective == "masked"
    texts = options.text
    if options.input == "-" and options.asks_for_several:
        raise ConfigError(
            "several processes continue one text, but each has a standard input: give --input FILE"
        )
    if options.input:
        if is_masked:
            check_holds_lines(options.input)
        check_shared_files([options.input])
        texts = read_texts((), options.input) if is_masked else (read_text(options.input),)
    if isinstance(loaded.model, EncoderOnly):
        raise ConfigError(f"{options.run} is an encoder without a head that fills in: use jf.embed")

    def answer(texts: tuple[str, ...]) -> None:
        if is_masked:
            print("\n".join(filled_texts(loaded, texts, count=options.count or 5)))
        else:
            _continue(loaded, options, texts)

    if texts or not text_io.is_interactive():
        texts = texts or loaded.config.prompts or ()
        answer(read_texts(texts, "") if is_masked else texts or ("",))
    else:
        what = f"a text with {_mask(loaded)} in it" if is_masked else "a text to continue"
        text_io.answer_lines(what, lambda line: answer((line,)))


def _mask(loaded: Loaded) -> str:
    tokenizer = loaded.require_tokenizer()
    mask = tokenizer.special.mask
    return "<mask>" if mask is None else tokenizer.token(mask)


def _continue(loaded: Loaded, options: GenerateOptions, texts: Sequence[str]) -> None:
    if options.count > 1 and not options.temperature:
        raise ConfigError(
            f"count={options.count} continuations would be alike: {GREEDY}, or leave out --count"
        )
    prompts = [text for text in texts for _ in range(options.count or 1)]
    asked = chat_ids(prompts, loaded, options) if options.chat else prompts
    pieces = pipelines.stream(loaded, asked, *options.settings)
    print_texts([f"{prompt}\n" for prompt in prompts] if options.chat else prompts, pieces)


def chat_ids(messages: list[str], loaded: Loaded, options: GenerateOptions) -> list[list[int]]:
    """The ids that ask for the assistant's answer to each message of a user."""
    tokenizer = loaded.require_tokenizer()
    template = find_template(run_folders(options.run)[0], tokenizer)
    if not template.source:
        raise ConfigError(
            f"{options.run} has no chat template, so nothing says how it is asked: leave out "
            "--chat, write the template into its chat_template.jinja, or teach it to answer by "
            "language_modelling.finetune --preset chat"
        )
    check_messages(messages, tokenizer)
    asked = ([{"role": "user", "content": message}] for message in messages)
    texts = [template.render(each, add_generation_prompt=True) for each in asked]
    return [ids for ids, _ in tokenizer.encode_with_special(texts)]


def print_texts(prompts: list[str], pieces: Iterable[tuple[int, str]]) -> None:
    """Prints the first text piece by piece, and the others at the end."""
    later_texts = [""] * len(prompts)
    begun = False
    for number, piece in pieces:
        if not begun:  # what cannot be continued is refused before anything is printed
            print(display.bold(prompts[0]), end="", flush=True)
            begun = True
        if number == 0:
            print(piece, end="", flush=True)
        else:
            later_texts[number] += piece
    print("" if begun else display.bold(prompts[0]))
    for prompt, text in list(zip(prompts, later_texts, strict=True))[1:]:
        print(f"{display.RULE}\n{display.bold(prompt)}{text}")


if __name__ == "__main__":
    sys.exit(cli.run(lambda: main(parse())))
