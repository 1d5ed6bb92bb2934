"""Rows of several corpora in fixed shares; a batch stays a function of (seed, step)."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jaxformer.errors import ConfigError
from jaxformer.text.data.batches import RowSelection, all_rows, check_step, select_rows
from jaxformer.text.data.masking import MaskedStream
from jaxformer.text.data.streams import Stream

_PERIOD = 4096
"""Rows after which the order of the corpora repeats; shares are multiples of its inverse."""


class Mixture:
    """Batches whose rows come from several streams of the same shape, in the shares `weights`.

    Weights are relative. Of the first n rows of a training, a stream of share w has given w n
    rows, up to (number of streams) + n / 4096. Each stream gives its rows in its own order and
    begins anew when it has given all. The empty rows that fill up its epoch count too.

    Attributes: `steps_per_epoch`, the batches that hold as many rows as all streams together.
    """

    def __init__(self, streams: Sequence[Stream | MaskedStream], weights: Sequence[float]) -> None:
        if len(streams) != len(weights) or min(weights, default=0.0) <= 0.0:
            raise ConfigError(
                f"a mixture needs a weight above 0 for each stream: got {len(streams)} streams, "
                f"and weights {[*weights]}"
            )
        forms = [_form(stream) for stream in streams]
        if any(form != forms[0] for form in forms):
            raise ConfigError(
                f"the rows of a mixture must have one form, but its streams give {forms}: give "
                "streams of one class, batch_size, seq_len and isolate_documents"
            )
        self._streams = list(streams)
        self._batch_size: int = streams[0].batch_size
        self._counts = _counts(np.asarray(weights, np.float64))
        self._order = _order(self._counts)
        one_hot = self._order[:, None] == np.arange(len(self._counts))
        before = np.cumsum(one_hot, axis=0) - one_hot
        self._before = before[np.arange(_PERIOD), self._order]
        self.steps_per_epoch: int = sum(stream.steps_per_epoch for stream in streams)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides the batches: those of the streams, and the shares."""
        values = ([stream.fingerprint for stream in self._streams], self._counts.tolist())
        return hashlib.sha256(repr(values).encode()).hexdigest()

    def batch(self, step: int, rows: RowSelection = all_rows) -> Any:
        """The batch of `step` (0, 1, ..), of which only the rows that `rows` selects are read."""
        check_step(step)
        own = select_rows(rows, self._batch_size)
        period, place = np.divmod(int(step) * self._batch_size + own, _PERIOD)
        chosen = self._order[place]
        steps, at = np.divmod(period * self._counts[chosen] + self._before[place], self._batch_size)
        parts = [
            (mask, self._streams[k].batch(number, lambda _, found=at[mask]: found))
            for k, number in sorted(set(zip(chosen.tolist(), steps.tolist(), strict=True)))
            if (mask := (chosen == k) & (steps == number)).any()
        ]
        masks, batches = zip(*parts, strict=True)
        leaves = (_joined(masks, leaves) for leaves in zip(*batches, strict=True))
        return type(batches[0])(*leaves)._replace(example_ids=own.astype(np.int32))


def _form(stream: Stream | MaskedStream) -> dict[str, tuple[int, ...]]:
    """The fields of a batch and their shapes."""
    return {x: leaf.shape for x, leaf in stream.batch(0)._asdict().items() if leaf is not None}


def _counts(weights: np.ndarray) -> Int[np.ndarray, " K"]:
    """The rows of each stream in a period: at least 1, by the largest remainders."""
    exact = weights / weights.sum() * _PERIOD
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    for index in np.argsort(counts - exact, kind="stable"):
        counts[index] += _PERIOD > counts.sum()
    counts[np.argmax(counts)] += _PERIOD - counts.sum()
    return counts


def _order(counts: Int[np.ndarray, " K"]) -> Int[np.ndarray, " period"]:
    """The stream of each row of a period: always the one that lags its share the most."""
    given, order = np.zeros_like(counts), np.empty(_PERIOD, np.int64)
    for place in range(_PERIOD):
        order[place] = np.argmax((place + 1) * counts - _PERIOD * given)
        given[order[place]] += 1
    return order


def _joined(masks: Sequence[np.ndarray], leaves: Sequence[Any]) -> Any:
    """A leaf of a batch from the leaves of its parts, whose rows `masks` name."""
    if leaves[0] is None:
        return None
    joined = np.empty((len(masks[0]), *leaves[0].shape[1:]), leaves[0].dtype)
    for mask, leaf in zip(masks, leaves, strict=True):
        joined[mask] = leaf
    return joined
