"""Texts in and out of commands: files, standard input, and a prompt at a terminal."""

import codecs
import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from experiments.harness.runs import distributed, user_cache
from experiments.harness.runs.source_kinds import content_beside_lines
from jaxformer.errors import ConfigError, DataError
from jaxformer.storage import is_in_bucket, to_path
from jaxformer.text.data import other_format


def read_text(path: str) -> str:
    """The text of the file `path`, or of standard input when it is "-".

    Raises `DataError` for what cannot be read or is not UTF-8.
    """
    with ExitStack() as stack:
        file = open_binary(path, stack)
        try:
            content = file.read()
        except OSError as error:
            raise _unreadable(path, error) from error
    if problem := _problem_of_format(content, source_name(path)):
        raise DataError(problem)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{source_name(path)}:{line}: the byte 0x{content[error.start]:02x} is not UTF-8: "
            "convert the text to UTF-8"
        ) from error


def read_texts(texts: tuple[str, ...], path: str) -> tuple[str, ...]:
    """`texts`, or the lines of the file `path` that are not blank; `ConfigError` for none."""
    if path:
        lines = read_text(path).split("\n")
        texts = tuple(line.removesuffix("\r") for line in lines if line.strip())
    if not texts:
        raise ConfigError("there is no text: give --text TEXT .. or --input FILE")
    return texts


def source_name(path: str) -> str:
    """The name of the file `path` in an error."""
    return "standard input" if path == "-" else path


def open_binary(path: str, stack: ExitStack) -> BinaryIO:
    """The file `path` to read, closed with `stack`; standard input when it is "-"."""
    if path == "-":
        return sys.stdin.buffer
    try:
        return stack.enter_context(user_cache.local_copy(to_path(path)).open("rb"))
    except OSError as error:
        raise _unreadable(path, error) from error


class Chunk(NamedTuple):
    """Lines of a file."""

    first: int
    """The number of the first line, from 1."""
    lines: list[str]
    problem: str = ""
    """Why no line follows, where the next one cannot be read."""


def read_chunks(file: BinaryIO, size: int, name: str) -> Iterator[Chunk]:
    """The lines of `file`, `size` at a time; only a line feed ends one.

    The first line that is not UTF-8 ends them; errors call the file `name`. Of a file in another
    format, such as PDF, there is no line.
    """
    first = 1
    while raw := _next_lines(file, size, name):
        if first == 1:
            if problem := _problem_of_format(raw[0], name):
                yield Chunk(first, [], problem)
                return
            raw[0] = raw[0].removeprefix(codecs.BOM_UTF8)
        lines, error = _decode(raw)
        if error is not None:
            byte = error.object[error.start]
            problem = (
                f"{name}:{first + len(lines)}: byte {error.start + 1} of the line (0x{byte:02x}) "
                "is not UTF-8: convert the text to UTF-8"
            )
            yield Chunk(first, lines, problem)
            return
        yield Chunk(first, lines)
        first += len(lines)


def _next_lines(file: BinaryIO, size: int, name: str) -> list[bytes]:
    try:
        return list(islice(file, size))
    except OSError as error:
        raise _unreadable(name, error) from error


def _decode(raw: list[bytes]) -> tuple[list[str], UnicodeDecodeError | None]:
    """The lines of `raw` up to the first that is not UTF-8, and the error of that one."""
    lines: list[str] = []
    for line in raw:
        try:
            lines.append(line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            return lines, error
    return lines, None


def _problem_of_format(beginning: bytes, name: str) -> str:
    """The reason why the file `name`, which begins so, is no text; "" where it may be one."""
    found = other_format(beginning)
    if not found:
        return ""
    return f"{name}: the input is {found}, but text is needed: convert it to UTF-8 text"


def check_holds_lines(path: str) -> None:
    """Raises `ConfigError` for a file whose name says that it holds records, columns or ids."""
    content = content_beside_lines(path)
    if content and to_path(path).is_file():  # which asks a bucket
        raise ConfigError(
            f"{path} holds {content}, but a file with one text on each line is needed: write the "
            "texts into a .txt file"
        )


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"{path}: cannot read the file: {error.strerror}")


def is_interactive() -> bool:
    """Whether a person types the input and reads the output."""
    return not distributed.is_several() and sys.stdin.isatty() and sys.stdout.isatty()


def answer_lines(kind: str, answer: Callable[[str], None]) -> None:
    """Asks for lines of a `kind` and calls `answer` with each that is not blank, until Ctrl-D.

    A line that is refused gives the reason, and the next one may follow.
    """
    print(f"Type {kind}; Ctrl-D ends.")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        try:
            if line.strip():
                answer(line)
        except (ConfigError, DataError) as error:
            print(f"error: {error}", file=sys.stderr)


def check_output(output: str, *inputs: str) -> None:
    """Raises `ConfigError` where the file `output` is one of `inputs`, which it would replace."""
    for name in inputs:
        if output and name and _is_same_file(to_path(output), to_path(name)):
            raise ConfigError(f"{output} is the input: give the output another name")


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, here also by links."""
    if is_in_bucket(one) or is_in_bucket(other):
        return one == other
    return one.exists() and other.exists() and one.samefile(other)
