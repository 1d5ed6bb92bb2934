"""All exceptions that the package raises by name, and what their messages need."""


class ConfigError(ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class DataError(ValueError):
    """A text, an id or a data file cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, damaged, or does not fit the state to restore."""


class Diverged(ArithmeticError):
    """The loss or its gradient was not finite for many steps in a row."""


class MissingExtra(ImportError):
    """An optional package is not installed."""


def shorten(text: str, width: int = 80) -> str:
    """The first words of `text` for a message: at most `width` characters, then ` ...`."""
    if len(text) <= width:
        return text
    return f"{text[: width + 1].rpartition(' ')[0] or text[:width]} ..."
