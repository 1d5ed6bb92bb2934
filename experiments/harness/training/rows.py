"""Examples as rows of ids: their batches, and what a model says of each."""

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from jaxformer.distributed import strategy_of
from jaxformer.errors import ConfigError
from jaxformer.text.data import RowSelection, all_rows


class LabelledBatch(NamedTuple):
    """B texts, padded at their ends, and their labels; rows outside `loss_mask` do not count."""

    tokens: Int[np.ndarray, "B T"]
    padding_mask: Bool[np.ndarray, "B T"]
    """False at padding."""
    labels: Int[np.ndarray, "B ..."]
    """The number of a class, or the first and the last token of an answer."""
    loss_mask: Bool[np.ndarray, " B"]
    example_ids: Int[np.ndarray, " B"]
    token_type_ids: Int[np.ndarray, "B T"] | None = None
    """The number of each token's text in a pair."""


class Rows(NamedTuple):
    """Batches of `size` examples; an epoch takes each once, in a new order."""

    examples: Any
    """All examples in one batch, such as a `LabelledBatch`."""
    chosen: Int[np.ndarray, " N"]
    """The numbers of the examples that are learned from."""
    size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The steps after which all examples have been seen once."""
        return -(-len(self.chosen) // self.size)

    @property
    def fingerprint(self) -> str:
        """A text that differs where batches differ."""
        digest = hashlib.sha256(repr((type(self.examples).__name__, *self[2:])).encode())
        for leaf in jax.tree.leaves((self.examples, self.chosen)):
            digest.update(repr((leaf.shape, leaf.dtype.str)).encode() + leaf.tobytes())
        return digest.hexdigest()

    def batch(self, step: int, rows: RowSelection = all_rows) -> Any:
        """The rows of the batch of `step` (0, 1, ..) that `rows` selects."""
        numbers = rows(self.size)
        epochs, places = np.divmod(step * self.size + numbers, len(self.chosen))
        orders = {epoch: _order(self.seed, 1 + epoch, len(self.chosen)) for epoch in set(epochs)}
        taken = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        batch = take(self.examples, self.chosen[taken])
        return batch._replace(example_ids=numbers.astype(np.int32))


def take(examples: Any, numbers: Int[np.ndarray, " B"]) -> Any:
    """The examples of these numbers, as a batch."""
    return jax.tree.map(lambda leaf: leaf[numbers], examples)


def choose(count: int, wanted: int, seed: int, labels: Any = None) -> Int[np.ndarray, " W"]:
    """The numbers of `wanted` (0: all) of `count` examples, as evenly over `labels` as possible.

    Raises `ConfigError` for more than there are, and for fewer than there are labels.
    """
    least = 1 if labels is None else len(np.unique(labels))
    if wanted and not least <= wanted <= count:
        raise ConfigError(
            f"num_examples={wanted}, but there are {count} examples of {least} kinds to learn "
            f"from: give --task.num_examples from {least} to {count}, or 0 for all of them"
        )
    order = _order(seed, 0, count)
    shuffled = np.zeros(count, np.int64) if labels is None else np.asarray(labels)[order]
    turn = np.zeros(count, np.int64)
    for label in np.unique(shuffled):
        turn[shuffled == label] = np.arange(np.sum(shuffled == label))
    return order[np.argsort(turn, kind="stable")[: wanted or None]]


def predict(
    outputs: Callable[[Any, Any], jax.Array], params: Any, examples: Any, size: int
) -> np.ndarray:
    """outputs(params, batch) of all `examples`, in order, computed `size` at a time.

    The devices that have `params` share them; the last batch is filled up.
    """
    devices = strategy_of(params)
    found = []
    for numbers in _in_parts(len(examples.example_ids), size):
        with devices.active():
            batch = devices.divide(take(examples, np.resize(numbers, size)))
            found.append(np.asarray(devices.gather(outputs(params, batch)))[: len(numbers)])
    return np.concatenate(found)


def _in_parts(count: int, size: int) -> Iterator[np.ndarray]:
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


@functools.lru_cache(maxsize=4)
def _order(seed: int, number: int, size: int) -> np.ndarray:
    """0 .. size - 1 in a random order, which depends on (seed, number) and on no version.

    Each batch of an epoch asks for it again.
    """
    bits = np.random.Philox(key=np.array([seed, number], np.uint64))
    order = np.argsort(bits.random_raw(size), kind="stable")
    order.flags.writeable = False
    return order
