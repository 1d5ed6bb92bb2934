"""Timing of several cases in turn: a disturbance of the machine reaches all of them."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxformer.config import check_at_least, check_choices


@dataclass(frozen=True)
class TimingConfig:
    """The number of measurements, and the file of the result."""

    name: str = "benchmark"
    """Name of the result file, RUNS/benchmarks/NAME.json."""
    rounds: int = 7
    """Number of rounds. Each round measures every case once, in order."""
    repetitions: int = 1
    """Repetitions of each case in a round."""
    round_seconds: float = 0.0
    """Repeats a short case until a round takes this many seconds; 0: --repetitions times."""
    warm_up: int = 1
    """Repetitions of each case before the first round; they are not measured."""
    case_seconds: float = 900.0
    """Seconds after which a case that is not measured yet is given up."""
    interleaved: bool = True
    """Measures the cases of a table in turn; otherwise one after the other, each alone."""
    runs: str = "runs"
    """Folder of all runs."""

    def __post_init__(self):
        check_choices(self)
        check_at_least(self, 1, "rounds", "repetitions", "warm_up", "case_seconds")


class Cost(NamedTuple):
    """Seconds of one repetition: elapsed (`wall`), and summed over all processors (`cpu`)."""

    wall: float
    cpu: float


Measure = Callable[[int], Cost]
"""measure(count) -> the mean cost of one of `count` repetitions."""


class Summary(NamedTuple):
    """Seconds of one repetition, over all rounds.

    `median` and `least` are elapsed seconds; `cpu` is the median of the processor seconds.
    `spread` is the interquartile range divided by the median, 0 for one round. `ratio` is `median`
    divided by the median of the fastest peer, None where no peer was measured.
    """

    median: float
    least: float
    spread: float
    cpu: float
    ratio: float | None


def timed(
    run: Callable[[], object],
    wait: Callable[[Any], object],
    wall: Callable[[], float] = time.perf_counter,
    cpu: Callable[[], float] = time.process_time,
) -> Measure:
    """Returns a function that measures `run`; `wait(result)` returns when the work is done."""

    def measure(count: int) -> Cost:
        begin = wall(), cpu()
        for _ in range(count):
            result = run()
        wait(result)
        end = wall(), cpu()
        return Cost((end[0] - begin[0]) / count, (end[1] - begin[1]) / count)

    return measure


def measure_in_turn(measures: Mapping[str, Measure], timing: TimingConfig) -> dict[str, list[Cost]]:
    """Returns the cost of each of `measures` in each round. All of them have warmed up before."""
    counts = dict.fromkeys(measures, timing.repetitions)
    if timing.round_seconds:
        for name, measure in measures.items():
            needed = math.ceil(timing.round_seconds / max(measure(1).wall, 1e-9))
            counts[name] = max(needed, timing.repetitions)
    costs: dict[str, list[Cost]] = {name: [] for name in measures}
    for _ in range(timing.rounds):
        for name, measure in measures.items():
            costs[name].append(measure(counts[name]))
    return costs


def summarise(costs: Mapping[str, Sequence[Cost]], peers: Collection[str]) -> dict[str, Summary]:
    """Returns a summary of the rounds of each case."""
    medians = {name: statistics.median(cost.wall for cost in costs[name]) for name in costs}
    best = min((medians[name] for name in peers if name in medians), default=None)
    return {
        name: Summary(
            median=medians[name],
            least=min(cost.wall for cost in rounds),
            spread=_interquartile_range([cost.wall for cost in rounds]) / medians[name],
            cpu=statistics.median(cost.cpu for cost in rounds),
            ratio=None if best is None else medians[name] / best,
        )
        for name, rounds in costs.items()
    }


def _interquartile_range(times: Sequence[float]) -> float:
    if len(times) == 1:
        return 0.0
    lower, _, upper = statistics.quantiles(times, method="inclusive")
    return upper - lower
