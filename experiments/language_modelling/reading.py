"""The texts that a command is given."""

import sys
from pathlib import Path

from jaxformer.config import ConfigError
from jaxformer.data import DataError


def read_text(path: str) -> str:
    """The text of the file `path`, of standard input when it is "-".

    Raises `DataError` for what cannot be read or is not UTF-8.
    """
    name = "standard input" if path == "-" else path
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read the file: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name}:{line}: the byte 0x{content[error.start]:02x} is not UTF-8: convert the text "
            "to UTF-8"
        ) from error


def texts_of(texts: tuple[str, ...], path: str) -> tuple[str, ...]:
    """`texts`, or the lines of the file `path` that are not blank; `ConfigError` for none."""
    if path:
        lines = read_text(path).split("\n")
        texts = tuple(line.removesuffix("\r") for line in lines if line.strip())
    if not texts:
        raise ConfigError("there is no text: give --text TEXT .. or --input FILE")
    return texts
