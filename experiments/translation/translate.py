"""Translate lines: `python -m experiments.translation.translate --run RUN < in.txt > out.txt`.

One line out for each line in, in order; a blank line gives an empty one. A line of more tokens
than the model's max_len gives an empty line too, is named on stderr, and makes the exit code 65.
A line that is not UTF-8 ends the work with code 65 when those before it are written.
"""

import codecs
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from experiments import commands, weights
from experiments.translation.evaluation import describe_too_long, without_too_long
from experiments.translation.trained import load_translator
from experiments.writing import one_line
from jaxformer.config import ConfigError, check_least
from jaxformer.data import DataError
from jaxformer.generation import Translation


@dataclass(frozen=True)
class TranslateOptions:
    """What to translate, with which run, and what to write of it.

    `run` is the folder of a run, or of a translation model as `transformers` writes it, with its
    tokenizer.json. `input` and `output` are files, "-" for standard input and output. `width` 0
    keeps the folder's beam width. `n_best` above 1, or `scores`, writes tab-separated lines: the
    input line's number (from 1), the score, the text, and with `scores` each token's
    log-probability. `int8`: with weights of 8 bits.
    """

    run: str = "runs/translation/grammar"
    input: str = "-"
    output: str = "-"
    width: int = 0
    n_best: int = 1
    scores: bool = False
    int8: bool = False
    lines_at_once: int = 2_000


def main(options: TranslateOptions) -> None:
    """Reads, translates and writes; then raises `DataError` for lines that could not be used."""
    _check(options)
    translator = load_translator(Path(options.run), options.width, options.n_best)
    translator = weights.in_int8(translator) if options.int8 else translator
    name = "standard input" if options.input == "-" else options.input
    too_long: list[int] = []
    problems: list[str] = []
    with ExitStack() as stack:
        source = _opened(options.input, "rb", sys.stdin.buffer, stack)
        target = _opened(options.output, "wb", sys.stdout.buffer, stack)
        for first, lines in _chunks(source, options.lines_at_once, name, problems):
            lines, numbers = without_too_long(translator, lines, translator.manner)
            too_long += [first - 1 + number for number in numbers]
            found = translator(lines)
            for number, hypotheses in enumerate(found, start=first):
                target.write(_format(number, hypotheses, options).encode())
            target.flush()
    if too_long:
        problems.append(f"{name}: {describe_too_long(translator.model, too_long)}")
    if problems:
        raise DataError("; ".join(problems))


def _check(options: TranslateOptions) -> None:
    check_least(options, 1, "n_best", "lines_at_once")
    check_least(options, 0, "width")
    paths = Path(options.input), Path(options.output)
    if options.input != "-" and all(map(Path.exists, paths)) and paths[0].samefile(paths[1]):
        raise ConfigError(f"{options.output} is the input: write the translations elsewhere")


def _opened(path: str, mode: str, standard: BinaryIO, stack: ExitStack) -> BinaryIO:
    if path == "-":
        return standard
    try:
        return stack.enter_context(open(path, mode))
    except OSError as error:
        if mode == "wb":
            raise
        raise DataError(f"{path}: cannot read the file: {error.strerror}") from error


def _chunks(
    source: BinaryIO, size: int, name: str, problems: list[str]
) -> Iterator[tuple[int, list[str]]]:
    """(number of the first line, lines) of `size` lines at a time; only a line feed ends one.

    The first line that is not UTF-8 ends them, and is described in `problems`.
    """
    first = 1
    while raw := list(islice(source, size)):
        if first == 1:
            raw[0] = raw[0].removeprefix(codecs.BOM_UTF8)
        lines, error = _decoded(raw)
        yield first, lines
        first += len(lines)
        if error is not None:
            byte = error.object[error.start]
            problems.append(
                f"{name}:{first}: byte {error.start + 1} of the line (0x{byte:02x}) is not UTF-8: "
                "convert the text to UTF-8"
            )
            return


def _decoded(raw: list[bytes]) -> tuple[list[str], UnicodeDecodeError | None]:
    """The lines of `raw` up to the first that is not UTF-8, and what is wrong with that one."""
    lines: list[str] = []
    for line in raw:
        try:
            lines.append(line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            return lines, error
    return lines, None


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
    options = {"default": TranslateOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
