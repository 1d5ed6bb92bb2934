"""Tables of cases timed in turn, each in a process of its own, printed and written as JSON.

A disturbance of the machine reaches all cases, and their thread pools do not compete.
"""

import contextlib
import datetime
import importlib.metadata
import multiprocessing
import os
import platform
import re
import signal
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from experiments.harness.results.tables import Table, markdown
from jaxformer.config import Checked, Count, Range, to_plain
from jaxformer.errors import ConfigError, MissingExtra
from jaxformer.records import write_json
from jaxformer.runtime import cpu_count

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "torch",
    "transformers",
    "ctranslate2",
    "jax-cuda13-plugin",
    "nvidia-cudnn-cu13",
)


@dataclass(frozen=True)
class TimingConfig(Checked):
    """The number of measurements, and the file of the result."""

    name: str = "benchmark"
    """Name of the result file, RUNS/benchmarks/NAME.json."""
    rounds: Count = 7
    """Number of rounds. Each round measures every case once, in order."""
    repetitions: Count = 1
    """Repetitions of each case in a round."""
    warm_up: Count = 1
    """Repetitions of each case before the first round; they are not measured."""
    case_seconds: Annotated[float, Range(1)] = 900.0
    """Seconds after which a case that is not measured yet is given up."""
    interleaved: bool = True
    """Measures the cases of a table in turn; otherwise one after the other, each alone, as cases
    must be that need most of a GPU's memory."""
    runs: str = "runs"
    """Folder of all runs."""


T = TypeVar("T", bound=TimingConfig)


def one_by_one(options: T) -> T:
    """`options` for cases that share one accelerator: each is alone, with few measurements."""
    return replace(options, rounds=5, repetitions=3, case_seconds=180.0, interleaved=False)


class Case(NamedTuple):
    """A case to measure: `run()` starts the work once, and `wait(result)` waits for its end.

    `metadata` is reported. "tokens" and "flops" count one `run()`.
    """

    run: Callable[[], Any]
    metadata: dict[str, Any]
    wait: Callable[[Any], object] = lambda result: None

    def seconds(self, count: int) -> float:
        """The mean elapsed seconds of one of `count` repetitions."""
        begin = time.perf_counter()
        for _ in range(count):
            result = self.run()
        self.wait(result)
        return (time.perf_counter() - begin) / count


MakeCase = Callable[[], Case]
"""make() -> Case. It is pickled: use `functools.partial` of a module's function."""


class Timing(NamedTuple):
    """Elapsed seconds of one repetition of a case, over all rounds, and its metadata.

    `spread` is the interquartile range divided by the median, 0 for one round. `ratio` is `median`
    divided by the median of the fastest peer, None where no peer was measured.
    """

    median: float
    least: float
    spread: float
    metadata: dict[str, Any]
    ratio: float | None = None


class Timings(NamedTuple):
    """Timings by name; `missing` holds the reason for each case that was not measured."""

    measured: dict[str, Timing]
    missing: dict[str, str]


class CaseFailed(Exception):
    """The case could not be made or measured."""


def measure_cases(
    makes: Mapping[str, MakeCase], timing: TimingConfig, *, peers: Collection[str] = ()
) -> Timings:
    """Measures each of `makes` in its own process; ratios are to the fastest of `peers`.

    With `timing.interleaved` all processes start and warm up, and are then measured in turn;
    otherwise one after the other. A case that fails is left out with its reason.
    """
    groups = [makes] if timing.interleaved else [{name: make} for name, make in makes.items()]
    workers: dict[str, _Worker] = {}
    for group in groups:
        with contextlib.ExitStack() as stack:
            started = {name: _Worker(make, timing, stack) for name, make in group.items()}
            for _ in range(timing.rounds):
                for worker in started.values():
                    worker.measure(timing.repetitions)
        workers |= started
    measured = {
        name: summarise(worker.seconds, worker.metadata)
        for name, worker in workers.items()
        if not worker.failure
    }
    best = min((measured[name].median for name in peers if name in measured), default=None)
    if best is not None:
        measured = {name: x._replace(ratio=x.median / best) for name, x in measured.items()}
    return Timings(measured, {name: x.failure for name, x in workers.items() if x.failure})


def summarise(seconds: Sequence[float], metadata: dict[str, Any]) -> Timing:
    """The timing of a case, without its ratio."""
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, method="inclusive") if len(seconds) > 1 else [0.0] * 3
    return Timing(median, min(seconds), (quartiles[2] - quartiles[0]) / median, metadata)


class _Worker:
    """A case in a process of its own, which ends with `stack`; `failure` is why it was given up."""

    def __init__(self, make: MakeCase, timing: TimingConfig, stack: contextlib.ExitStack) -> None:
        self.failure = ""
        self.seconds: list[float] = []
        # fork would copy the locks of libraries that run threads
        context = multiprocessing.get_context("spawn")
        self._pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=context))
        self._process = self._pool.submit(os.getpid).result()
        self._allowed = timing.case_seconds
        self._end = time.monotonic() + timing.case_seconds
        self.metadata: dict[str, Any] = self._call(_make, make, timing.warm_up)

    def measure(self, count: int) -> None:
        """Adds the mean seconds of one of `count` repetitions, unless the case has failed."""
        if not self.failure:
            self.seconds.append(self._call(_seconds, count))

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            future = self._pool.submit(_guarded, function, *args)
            return future.result(max(self._end - time.monotonic(), 0.0))
        except CaseFailed as error:
            self.failure = str(error)
        except TimeoutError:
            os.kill(self._process, signal.SIGKILL)
            self.failure = f"took longer than case_seconds={self._allowed:g}"
        except BrokenProcessPool:
            self.failure = "its process has ended"


def _guarded(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function`; every error as a `CaseFailed`, which another process can read."""
    try:
        return function(*args)
    except (ConfigError, MissingExtra) as error:
        raise CaseFailed(str(error)) from None
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise CaseFailed(f"{type(error).__name__}: {first}"[:500]) from None


_case: Case | None = None
"""The case that this process measures."""


def _make(make: MakeCase, warm_up: int) -> dict[str, Any]:
    """Makes the case of this process, and runs it `warm_up` times; its metadata."""
    global _case
    _case = make()
    for _ in range(warm_up):
        _case.wait(_case.run())
    return _case.metadata


def _seconds(count: int) -> float:
    """The mean seconds of the case of this process."""
    assert _case is not None
    return _case.seconds(count)


def columns_of(timing: Timing) -> dict[str, str]:
    """The cells of the row of a case, by the titles of their columns; "-" for what is not known."""
    seconds, facts = timing.median, timing.metadata
    tokens, flops = facts.get("tokens"), facts.get("flops")
    peak, temporary = facts.get("peak_flops"), facts.get("temporary_bytes")
    cells = {
        "median, ms": f"{seconds * 1e3:.1f}",
        "least, ms": f"{timing.least * 1e3:.1f}",
        "spread": f"{timing.spread:.0%}",
        "of the best peer": "-",
        "tokens a second": "-",
        "TFLOP/s": "-",
        "of the peak": "-",
        "temporary, MB": "-",
    }
    if timing.ratio is not None:
        cells["of the best peer"] = f"{timing.ratio:.2f}"
    if tokens:
        cells["tokens a second"] = f"{tokens / seconds:,.0f}"
    if flops:
        cells["TFLOP/s"] = f"{flops / seconds / 1e12:,.1f}"
    if flops and peak:
        cells["of the peak"] = f"{flops / seconds / peak:.1%}"
    if temporary:
        cells["temporary, MB"] = f"{temporary / 1e6:,.1f}"
    return cells


def run_tables(
    options: TimingConfig,
    tables: Mapping[str, Mapping[str, MakeCase]],
    peers: Sequence[str] = (),
) -> dict[str, Timings]:
    """Measures each of `tables` (title -> cases), prints it, and writes all so far to a file.

    The file is RUNS/benchmarks/NAME.json, with the options and the environment before the first
    measurement. Ratios are to the fastest of `peers`.
    """
    content = {"environment": environment(), "options": to_plain(options)}
    path = Path(options.runs) / "benchmarks" / f"{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    print("; ".join(f"{name} {x}" for name, x in content["environment"].items() if x is not None))
    results: dict[str, Timings] = {}
    for title, cases in tables.items():
        results[title] = measure_cases(cases, options, peers=peers)
        print(f"\n{title}\n\n{table(results[title])}", flush=True)
        rows = {
            title: {
                "measured": {name: timing._asdict() for name, timing in timings.measured.items()},
                "missing": timings.missing,
            }
            for title, timings in results.items()
        }
        write_json(path, content | {"tables": rows})
    print(f"\nall numbers: {path}")
    return results


def table(timings: Timings) -> str:
    """A row for each case, its metadata, and a line for each that was not measured.

    A column without any cell is left out.
    """
    cells = {name: columns_of(timing) for name, timing in timings.measured.items()}
    titles = [
        title
        for title in next(iter(cells.values()), {})
        if any(row[title] != "-" for row in cells.values())
    ]
    rows = [(name, *(row[title] for title in titles)) for name, row in cells.items()]
    lines = [markdown(Table(("", *titles), rows))]
    for name, timing in timings.measured.items():
        facts = ", ".join(f"{key} {value}" for key, value in timing.metadata.items())
        if facts:
            lines.append(f"{name}: {facts}")
    lines += [f"not measured: {name}: {why}" for name, why in timings.missing.items()]
    return "\n".join(lines)


def environment() -> dict[str, str | int | float | None]:
    """Date (UTC), processor, cores of this process, load of the last minute, versions.

    A package that is not installed has None. No device is started: each case reports its device.
    """
    versions: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text("utf-8")) if info.exists() else []
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **versions,
    }
