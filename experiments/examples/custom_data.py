"""Data of your own for a language model: documents, their tokenizer, and batches.

Each is given by its name on the command line, or to `train` from Python:

    --data.train experiments.examples.custom_data:sums
    --data.tokenizer experiments.examples.custom_data:digits
    --data.batches experiments.examples.custom_data:overfit
"""

from collections.abc import Iterable, Iterator
from typing import Any

from jaxformer.text.data import Batches, RowSelection
from jaxformer.text.tokenizers import SPECIAL_TOKENS, Tokenizer, train_characters


def sums() -> Iterator[str]:
    """Documents: all sums of two numbers below 100."""
    return (f"{a}+{b}={a + b}" for a in range(100) for b in range(100))


def digits(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer that needs to see no text."""
    return train_characters(["0123456789+="], special_tokens=SPECIAL_TOKENS)


class Repeated:
    """The first `count` batches of `batches`, again and again."""

    def __init__(self, batches: Batches, count: int):
        self._batches = batches
        self.steps_per_epoch = count
        self.fingerprint = f"{count} batches of {batches.fingerprint}"

    def batch(self, step: int, rows: RowSelection) -> Any:
        return self._batches.batch(step % self.steps_per_epoch, rows)


def overfit(config: Any, prepared: Any) -> Batches:
    """Two batches only: a model that cannot learn them by heart has a defect."""
    return Repeated(prepared.batches, 2)
