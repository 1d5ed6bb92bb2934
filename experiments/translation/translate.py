"""Translate lines: `python -m experiments.translation.translate --run RUN < in.txt > out.txt`.

Each line gives one line, in order; a blank one gives an empty one. A line with more tokens than the
model's max_len gives an empty line, a message on stderr, and exit code 65. At a line that is not
UTF-8 the command ends with code 65 after writing those before it. On a terminal it is a prompt.
"""

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from experiments.harness import cli
from experiments.harness.cli import display
from experiments.harness.runs import distributed, text_io
from experiments.harness.runs.decoding_options import DecodingOptions, load_members, run_folders
from experiments.harness.runs.sample_tables import one_line
from experiments.harness.runs.shared_inputs import check_shared_files
from experiments.harness.runs.text_io import (
    check_holds_lines,
    check_output,
    open_binary,
    read_chunks,
    source_name,
)
from experiments.translation.known_words import read_known_words, unknown_words
from experiments.translation.load_run import load_decoding
from experiments.translation.scoring import describe_too_long, prepare_sources
from jaxformer import storage
from jaxformer.config import Count
from jaxformer.errors import ConfigError, DataError
from jaxformer.pipelines import Translation, translate_with_details
from jaxformer.pretrained import Loaded


@dataclass(frozen=True)
class TranslateOptions(DecodingOptions):
    """The model, the lines, and what to write."""

    run: str = "runs/translation/grammar"
    """The folder of a run, or of a translation model as transformers writes it; several folders,
    separated by commas, translate as one ensemble."""
    input: str = "-"
    """The file to translate; "-" is standard input."""
    output: str = "-"
    """The file to write; "-" is standard output."""
    n_best: Count = 1
    """Translations of each line; above 1 as tab-separated line number (from 1), score, text. The
    score is the log-probability with length penalty."""
    scores: bool = False
    """Adds a column with the log-probability of each token."""
    int8: bool = False
    """Computes with weights of 8 bits."""
    lines_at_once: Count = 2_000
    """Lines that are read and translated together."""


@distributed.joins
def main(options: TranslateOptions) -> None:
    """Reads, translates and writes; then raises `DataError` for lines that could not be used."""
    _check(options)
    check_holds_lines(options.input)
    if options.input != "-":
        check_shared_files([options.input])
    load = partial(load_decoding, options=options, n_best=options.n_best)
    loaded = load_members(load, options.run, int8=options.int8)
    if options.input == options.output == "-" and text_io.is_interactive():
        _converse(loaded, options)
        return
    name = source_name(options.input)
    too_long: list[int] = []
    problems: list[str] = []
    with ExitStack() as stack:
        source, target = open_binary(options.input, stack), sys.stdout.buffer
        is_printed = options.output == "-"
        stack.enter_context(storage.naming("standard output" if is_printed else options.output))
        if not is_printed:
            path = storage.to_path(options.output if distributed.is_first() else os.devnull)
            folder = path.parent  # one that is not there is an error, not made
            if storage.is_in_bucket(path):
                folder = stack.enter_context(storage.written_here(folder))
            target = stack.enter_context((folder / path.name).open("wb"))
        for chunk in read_chunks(source, options.lines_at_once, name):
            if chunk.lines:
                lines, numbers = prepare_sources(loaded, chunk.lines)
                too_long += [chunk.first - 1 + number for number in numbers]
                with display.waiting(f"translating {len(lines):,} lines"):
                    translations = translate_with_details(loaded, lines)
                for number, hypotheses in enumerate(translations, start=chunk.first):
                    target.write(_format(number, hypotheses, options).encode())
                target.flush()
            if chunk.problem:
                problems.append(chunk.problem)
    if too_long:
        problems.append(f"{name}: {describe_too_long(loaded.model, too_long)}")
    if problems:
        raise DataError("; ".join(problems))


def _converse(loaded: Loaded, options: TranslateOptions) -> None:
    """Translates what is typed, and says which words the training text does not have."""
    known = read_known_words(run_folders(options.run)[0])

    def answer(line: str) -> None:
        (line,), too_long = prepare_sources(loaded, [line])
        if too_long:
            raise DataError(describe_too_long(loaded.model, too_long))
        print(_format(1, translate_with_details(loaded, line), options), end="")
        unknown = unknown_words(known, line)
        if unknown:
            print(f"  (not in the training text: {', '.join(unknown)})", file=sys.stderr)

    text_io.answer_lines("a sentence", answer)


def _check(options: TranslateOptions) -> None:
    if options.input == "-" and options.asks_for_several:
        raise ConfigError(
            "several processes translate one text, but each has a standard input: give --input FILE"
        )
    check_output(*("" if path == "-" else path for path in (options.output, options.input)))


def _format(number: int, hypotheses: list[Translation], options: TranslateOptions) -> str:
    if options.n_best == 1 and not options.scores:
        return one_line(hypotheses[0].text) + "\n"
    rows = []
    for hypothesis in hypotheses[: options.n_best]:
        columns = [str(number), f"{hypothesis.score:.4f}", one_line(hypothesis.text)]
        if options.scores:
            columns.append(" ".join(f"{x:.4f}" for x in hypothesis.log_probs))
        rows.append("\t".join(columns) + "\n")
    return "".join(rows)


if __name__ == "__main__":
    cli.start(main, {"default": TranslateOptions()}, __doc__)
