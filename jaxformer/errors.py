"""All exceptions that the package raises by name, and what their messages need."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """A setting is unknown, out of range, or contradicts another.

    >>> jf.TransformerConfig(vocab_size=11, d_model=8, d_ff=12, num_heads=3)
    Traceback (most recent call last):
        ...
    jaxformer.errors.ConfigError: d_model=8 is not divisible by num_heads=3: choose ...
    """


class DataError(ValueError):
    """A text, an id or a data file cannot be used.

    >>> jf.score_translations(["Ein Haus.", "Zwei."], ["Ein Haus."])
    Traceback (most recent call last):
        ...
    jaxformer.errors.DataError: 2 hypotheses and 1 references: give one reference ...
    """


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, damaged, or does not fit the state to restore.

    >>> jf.Checkpoints("empty").restore({})
    Traceback (most recent call last):
        ...
    jaxformer.errors.CheckpointError: there is no committed checkpoint in ...: train first
    """


class Diverged(ArithmeticError):
    """The loss or its gradient was not finite for many steps in a row.

    >>> from jaxformer.training.train_step import raise_if_diverged
    >>> metrics = {"loss": float("nan"), "grad_norm": float("nan"), "consecutive_skips": 10}
    >>> raise_if_diverged(12, metrics)
    Traceback (most recent call last):
        ...
    jaxformer.errors.Diverged: the loss or its gradient was not finite in 10 steps in a row, ...
    """


class MissingExtra(ImportError):
    """An optional package is not installed.

    >>> from jaxformer import optional_dependencies
    >>> optional_dependencies.load("a_package_that_is_not_installed")
    Traceback (most recent call last):
        ...
    jaxformer.errors.MissingExtra: a_package_that_is_not_installed is needed ...
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` comes from JAX and says that memory was short."""
    # XLA's words: on every platform, on some platforms, and for a large product on a CPU.
    signs = ("resource_exhausted", "out of memory", "ynnpack operation failed")
    is_of_jax = type(error).__name__ == "JaxRuntimeError"  # errors are raised without JAX, too
    return is_of_jax and any(sign in str(error).lower() for sign in signs)


def listed(reasons: Sequence[str], most: int = 5) -> str:
    """The first `most` of `reasons` for a message; the others are counted."""
    more = f"; and {len(reasons) - most} more" if len(reasons) > most else ""
    return "; ".join(reasons[:most]) + more


def shorten(text: str, width: int = 80) -> str:
    """The first words of `text` for a message: at most `width` characters, then ` ...`."""
    if len(text) <= width:
        return text
    return f"{text[: width + 1].rpartition(' ')[0] or text[:width]} ..."
