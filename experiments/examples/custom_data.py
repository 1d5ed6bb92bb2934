"""Data of your own for a language model: documents, their tokenizer, and batches.

Each is given by its name on the command line, or to `train` from Python:

    --data.train experiments.examples.custom_data:sums
    --data.tokenizer experiments.examples.custom_data:digits
    --data.batches experiments.examples.custom_data:overfit
    --data.batches experiments.examples.custom_data:from_grain
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from jaxformer.errors import DataError
from jaxformer.text.data import Batches, RowSelection, StreamBatch
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


class Elements(Protocol):
    """The part of a grain `MapDataset` that is read: its length, and the element of a number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class GrainBatches:
    """Batches of a grain `MapDataset` whose elements are rows of `seq_len` + 1 ids.

    Grain gives the element of any number, also in later epochs, so a batch is a function of the
    step, and a process reads only its rows. Grain keeps neither seed nor identity of a data set:
    `identity` is a text that differs where the elements do. Raises `DataError` for a filtered
    element.
    """

    def __init__(self, dataset: Elements, batch_size: int, *, vocab_size: int, identity: str):
        self._dataset, self._batch_size, self._vocab_size = dataset, batch_size, vocab_size
        self.steps_per_epoch = -(-len(dataset) // batch_size)
        self.fingerprint = f"grain: {identity}, {len(dataset)} rows, {batch_size} in a batch"

    def batch(self, step: int, rows: RowSelection) -> StreamBatch:
        numbers = rows(self._batch_size)
        read = numbers if len(numbers) else np.zeros(1, int)
        elements = [self._dataset[int(i)] for i in step * self._batch_size + read]
        if any(element is None for element in elements):
            raise DataError("grain filters an element of the batch: filter before the data set")
        batch = StreamBatch.create(np.stack(elements), vocab_size=self._vocab_size)
        return StreamBatch(
            batch.tokens[: len(numbers)], batch.loss_mask[: len(numbers)], numbers.astype(np.int32)
        )


def from_grain(config: Any, prepared: Any) -> Batches:
    """The training text in rows, shuffled by grain (`pip install grain`); a seed of its own."""
    import grain

    ids, length = prepared.train.tokens.ids, config.data.seq_len + 1
    rows = grain.MapDataset.range(len(ids) // length)
    rows = rows.shuffle(seed=config.training.seed)
    rows = rows.map(lambda row: np.asarray(ids[row * length : (row + 1) * length], np.int32))
    return GrainBatches(
        rows,
        config.data.batch_size,
        vocab_size=prepared.model.vocab_size,
        identity=f"{prepared.train.tokens.fingerprint}, seed {config.training.seed}",
    )
