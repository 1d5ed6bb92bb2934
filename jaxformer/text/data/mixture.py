"""Several sources of batches as one, whose rows come from each by its share."""

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from math import ceil, gcd, lcm
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int64

from jaxformer.errors import ConfigError
from jaxformer.text.data.batches import (
    Batches,
    RowSelection,
    all_rows,
    check_at_least,
    select_rows,
)

_LONGEST_PERIOD = 100_000


class MixedBatches(Batches, Protocol):
    """A source of a mixture; `Stream` and `MaskedStream` are such sources."""

    @property
    def batch_size(self) -> int:
        """The rows of a batch."""
        ...

    @property
    def rows_per_epoch(self) -> int:
        """The rows of an epoch, without the empty ones that fill up its last batch."""
        ...


class Mixture:
    """Batches whose rows come from several sources, in fixed proportions.

    `sources` have one batch size, and their batches are named tuples of arrays with `example_ids`.
    `shares` are positive numbers, whose sum does not matter. After any number of rows, the count of
    each source differs from its share by less than one; between any two rows, by less than one
    where there are two sources, and by less than two where there are more, for which no order does
    better in general. A source whose rows end goes on with its next epoch. A batch is a function of
    the step. Raises `ConfigError` for shares that are not positive, and for shares whose order
    repeats after more than 100,000 rows only.

    Attributes: `sources`; `shares`, with the sum 1; `batch_size`; `steps_per_epoch`, after which
    every source has been read once.

    >>> from jaxformer.text.data import Mixture, Tokens
    >>> texts = {"a": Tokens.from_lists([[5] * 40]), "b": Tokens.from_lists([[7] * 40])}
    >>> options = {"batch_size": 4, "seq_len": 3, "seed": 0, "isolate_documents": False}
    >>> sources = {name: jf.Stream(text, **options) for name, text in texts.items()}
    >>> mixture = Mixture(sources, {"a": 0.75, "b": 0.25})
    >>> mixture.batch(0).tokens[:, 1].tolist()
    [5, 5, 7, 5]
    >>> mixture.passes(14)  # 42 rows of the 14 of the one text, 14 of the 14 of the other
    {'a': 3.0, 'b': 1.0}
    """

    def __init__(self, sources: Mapping[str, MixedBatches], shares: Mapping[str, float]) -> None:
        if sources.keys() != shares.keys() or not sources:
            raise ConfigError(
                f"sources are {list(sources)}, but shares are for {list(shares)}: give one share "
                "for each source"
            )
        sizes = {source.batch_size for source in sources.values()}
        if len(sizes) > 1:
            raise ConfigError(f"sources have the batch sizes {sorted(sizes)}: give them one")
        self.sources = dict(sources)
        self.batch_size: int = sizes.pop()
        self._weights = _whole_weights({name: shares[name] for name in sources})
        self._period = sum(self._weights)
        self._order = _fair_order(self._weights)
        self._ranks = np.zeros(self._period, np.int64)  # of a row among the rows of its source
        for number, weight in enumerate(self._weights):
            self._ranks[self._order == number] = np.arange(weight)
        self.shares: dict[str, float] = {
            name: weight / self._period for name, weight in zip(sources, self._weights, strict=True)
        }
        self.steps_per_epoch: int = ceil(
            max(sources[name].rows_per_epoch / self.shares[name] for name in sources)
            / self.batch_size
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what decides the batches: sources and shares."""
        prints = [source.fingerprint for source in self.sources.values()]
        return hashlib.sha256(repr((prints, self._weights)).encode()).hexdigest()

    def batch(self, step: int, rows: RowSelection = all_rows) -> Any:
        """The batch of `step` (0, 1, ..); only the rows that `rows` selects are read."""
        check_at_least(0, step=int(step))
        selected = select_rows(rows, self.batch_size)
        read = selected if len(selected) else np.zeros(1, np.int64)
        numbers, places = self.places(int(step) * self.batch_size + read)
        parts, order = [], []
        for number, source in enumerate(self.sources.values()):
            chosen = np.flatnonzero(numbers == number)
            epochs, inside = np.divmod(places[chosen], source.rows_per_epoch)
            steps = epochs * source.steps_per_epoch + inside // self.batch_size
            for source_step in np.unique(steps).tolist():
                of_step = steps == source_step
                source_rows = inside[of_step] % self.batch_size
                parts.append(source.batch(source_step, partial(_chosen_rows, source_rows)))
                order.append(chosen[of_step])
        back = np.argsort(np.concatenate(order))[: len(selected)]
        leaves = (_in_order(leaf, back) for leaf in zip(*parts, strict=True))
        return type(parts[0])(*leaves)._replace(example_ids=selected.astype(np.int32))

    def places(
        self, rows: Int64[np.ndarray, " W"]
    ) -> tuple[Int64[np.ndarray, " W"], Int64[np.ndarray, " W"]]:
        """The number of the source of each of `rows`, counted from step 0, and which of its rows it
        is."""
        periods, inside = np.divmod(rows, self._period)
        numbers = self._order[inside]
        return numbers, periods * np.array(self._weights)[numbers] + self._ranks[inside]

    def passes(self, step: int) -> dict[str, float]:
        """The number of times that each source has been read before `step`."""
        periods, inside = divmod(step * self.batch_size, self._period)
        counts = np.bincount(self._order[:inside], minlength=len(self._weights))
        counts += periods * np.array(self._weights)
        return {
            name: int(count) / source.rows_per_epoch
            for (name, source), count in zip(self.sources.items(), counts, strict=True)
        }


def _chosen_rows(chosen: np.ndarray, rows: int) -> np.ndarray:
    """The rows `chosen` of a batch, whatever its number of `rows`."""
    return chosen


def _in_order(leaves: tuple[Any, ...], order: np.ndarray) -> np.ndarray | None:
    """The rows of all arrays in `order`; None where each is None."""
    absent = [leaf is None for leaf in leaves]
    if all(absent):
        return None
    if any(absent):
        raise ConfigError(
            "a batch of one source has an array that a batch of another lacks: make all sources "
            "in the same way, such as with isolate_documents in each or in none"
        )
    return np.concatenate(leaves)[order]


def check_shares(shares: Mapping[str, float]) -> None:
    """Raises `ConfigError` for a share that is not positive, or not finite."""
    for name, share in shares.items():
        if not 0 < share < float("inf"):
            raise ConfigError(f"the share of {name} is {share}, but it must be positive")


def _whole_weights(shares: Mapping[str, float]) -> list[int]:
    """Whole numbers in the proportions of `shares`, as small as possible."""
    check_shares(shares)
    exact = [Fraction(str(share)) for share in shares.values()]
    common = lcm(*(share.denominator for share in exact))
    weights = [int(share * common) for share in exact]
    weights = [weight // gcd(*weights) for weight in weights]
    if sum(weights) > _LONGEST_PERIOD:
        raise ConfigError(
            f"shares of {', '.join(f'{name}={share}' for name, share in shares.items())} repeat "
            f"after {sum(weights):,} rows, but {_LONGEST_PERIOD:,} is the most: give fewer digits, "
            "such as 0.3333"
        )
    return weights


def _fair_order(weights: list[int]) -> np.ndarray:
    """Numbers of sources in an order in which each has its share of every beginning.

    Tijdeman 1980, The chairman assignment problem: after any number of places, a source of k has
    1 - 1 / (2k - 2) places more or less than its share at most.
    """
    period, slack = sum(weights), 2 * max(len(weights) - 1, 1)
    counts = [0] * len(weights)
    order = np.empty(period, np.int64)
    for place in range(period):
        lacks = [  # places times `slack * period`
            ((place + 1) * weight - count * period) * slack
            for weight, count in zip(weights, counts, strict=True)
        ]
        chosen = min(
            (i for i, lack in enumerate(lacks) if lack >= period),
            key=lambda i: Fraction((slack - 1) * period - lacks[i], weights[i]),
        )
        counts[chosen] += 1
        order[place] = chosen
    return order
