"""Things measured in turn, so that what disturbs the machine disturbs all of them alike."""

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from jaxformer.config import ConfigError


class Cost(NamedTuple):
    """Seconds of one repetition: on the wall, and of all processors together."""

    wall: float
    cpu: float


Measure = Callable[[int], Cost]
"""measure(count) -> the mean cost of one of `count` repetitions."""


class Summary(NamedTuple):
    """Seconds of one repetition, over the rounds.

    `median` and `least` are on the wall, `cpu` is the median of all processors together. `spread`
    is the distance between the quartiles as a share of the median, 0 with one round. `ratio` is
    `median` as a share of the best peer's, None where no peer was measured.
    """

    median: float
    least: float
    spread: float
    cpu: float
    ratio: float | None


def timed(
    run: Callable[[], object],
    wall: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.process_time,
) -> Measure:
    """`run` as something that can be measured; it returns only when its work is done."""

    def measure(count: int) -> Cost:
        begin = wall(), cpu()
        for _ in range(count):
            run()
        end = wall(), cpu()
        return Cost((end[0] - begin[0]) / count, (end[1] - begin[1]) / count)

    return measure


def alternate(measures: Mapping[str, Measure], *, rounds: int, count: int) -> dict[str, list[Cost]]:
    """The costs of each in `rounds` rounds; a round has `count` repetitions of each, in order.

    All of `measures` have warmed up before. Raises `ConfigError` for less than one round or
    repetition.
    """
    if min(rounds, count) < 1:
        raise ConfigError(f"rounds={rounds} of {count} repetitions measure nothing: give 1 or more")
    costs: dict[str, list[Cost]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            costs[name].append(measure(count))
    return costs


def summarise(costs: Mapping[str, Sequence[Cost]], peers: Collection[str]) -> dict[str, Summary]:
    """What the rounds of each come to; the best of `peers` is the one of least median."""
    medians = {name: statistics.median(cost.wall for cost in costs[name]) for name in costs}
    best = min((medians[name] for name in peers if name in medians), default=None)
    return {
        name: Summary(
            median=medians[name],
            least=min(cost.wall for cost in rounds),
            spread=_quartiles_apart([cost.wall for cost in rounds]) / medians[name],
            cpu=statistics.median(cost.cpu for cost in rounds),
            ratio=None if best is None else medians[name] / best,
        )
        for name, rounds in costs.items()
    }


def _quartiles_apart(times: Sequence[float]) -> float:
    if len(times) == 1:
        return 0.0
    lower, _, upper = statistics.quantiles(times, method="inclusive")
    return upper - lower
