"""A prompt at a terminal: one answer for each line."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from jaxformer.errors import ConfigError, DataError


def is_interactive() -> bool:
    """Whether a person types the input and reads the output."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def mark(prompt: str) -> str:
    """`prompt` in bold where standard output is a terminal, so that one sees where it ends."""
    plain = not prompt or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb"
    return prompt if plain else f"\x1b[1m{prompt}\x1b[0m"


def answer_lines(what: str, answer: Callable[[str], None]) -> None:
    """Asks for `what` and calls `answer` with each line that is not blank, until Ctrl-D.

    A line that is refused gives the reason, and the next one may follow.
    """
    print(f"Type {what}; Ctrl-D ends.")
    for line in _lines("> "):
        try:
            answer(line)
        except (ConfigError, DataError) as error:
            print(f"error: {error}", file=sys.stderr)


def _lines(prompt: str) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history
    while True:
        try:
            line = input(prompt)
        except EOFError:
            print()
            return
        if line.strip():
            yield line
