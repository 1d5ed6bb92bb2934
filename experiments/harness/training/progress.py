"""Progress of a training: the numbers of each step, logged, and shown as a line or as a panel."""

import datetime
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from jaxtyping import Float

from experiments.harness.cli import display
from experiments.harness.runs.run_folder import Run
from experiments.harness.training.pace import Pace
from experiments.harness.training.task import Sample, sample_lines
from experiments.harness.training.utilization import memory_in_use
from jaxformer import optional_dependencies
from jaxformer.training.train_step import STEP_STATISTICS, raise_if_diverged

WIDE, HIGH = 100, 24
"""Columns and rows of a terminal that has room for the panel."""


class _Step(NamedTuple):
    """The arguments of `Progress.add`, and whether the step was compiled first."""

    number: int
    metrics: Mapping[str, Any]
    positions: int
    flops: float
    data_wait: float
    compiled: bool


@dataclass
class _Sums:
    """Sums over the steps since the last logged one, without those that were compiled first."""

    steps: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    flops: float = 0.0
    data_wait: float = 0.0
    device_wait: float = 0.0

    def speeds(self, peak: float | None) -> dict[str, float]:
        """Tokens per second, mean wait for a batch, and the share of `peak` FLOP/s; {} at first."""
        if self.seconds <= 0.0:
            return {}
        tokens_per_second, wait = self.tokens / self.seconds, self.data_wait / self.steps
        speeds = {"tokens_per_second": tokens_per_second, "data_wait": wait}
        return speeds if peak is None else speeds | {"mfu": self.flops / self.seconds / peak}


class Progress:
    """Logs every `log_every`-th step of `total` (0: only the last), and shows how far training is.

    On a terminal it is a live area, with a line above it for each logged step; elsewhere a line
    every `every` seconds. A step is fetched from the device when the next one has been dispatched:
    the next batch is built and sent while the device computes this one. What is logged of a step
    depends on this step alone, except for the speed: a resumed run logs the same. Without `log`
    nothing is logged. `learning_rates` are those of all updates. `peak` is the FLOP/s that the
    devices can do together; with it `mfu` is logged, the share of it that the steps' FLOPs made
    since the last logged step. `data_wait` is the mean time in seconds that a step waited for its
    batch. `memory()` gives further numbers to log (see `memory_in_use`). A slow step and, at each
    logged step, a host for which the others wait are said (see `Pace`).

    The speed is that of the steps alone: the first step of each shape of batch, which compiles,
    and what is done within `pause` are left out. The estimate of the time left counts the pauses
    to come, one every `pause_every` steps and two at the end, each as long as the last one.
    """

    def __init__(
        self,
        total: int,
        log: Run | None,
        *,
        log_every: int,
        pause_every: int = 0,
        learning_rates: Float[np.ndarray, " updates"] | None = None,
        peak: float | None = None,
        memory: Callable[[], Mapping[str, float]] = memory_in_use,
        every: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._log = total, log
        self._log_every, self._pause_every = log_every, pause_every
        self._learning_rates, self._peak, self._memory = learning_rates, peak, memory
        self._every, self._stream, self._clock = every, stream, clock
        self._stack = ExitStack()
        self._pending: _Step | None = None
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._compiles = True  # whether the step to be added was compiled first
        self._since: float | None = None  # when the last step, compilation or pause ended
        self._sums = _Sums()
        self._used: Mapping[str, float] = {}
        self.pace: Pace = Pace(clock)
        self._pause: float | None = None
        self._together = True  # whether all processes go on
        self._printed = -float("inf")
        self._unprinted = ""
        self._view = View(0, total, "", None)

    def announce(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, a function of (state, batch), which says when it compiles.

        It does for the first batch of each shape, and waits for the result.
        """

        def announced(state: Any, batch: Any) -> Any:
            shape = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
            if shape in self._shapes:
                before = self._clock()
                result = step(state, batch)  # may wait for other hosts
                self._sums.device_wait += self._clock() - before
                return result
            self.settle()
            self._shapes.add(shape)
            self._compiles = True
            with display.phase(f"compiling the step, shape {len(self._shapes)} of batch"):
                result = jax.block_until_ready(step(state, batch))
            self._since = self._clock()
            return result

        return announced

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Within it something else is done than steps, which the screen calls `name`."""
        self.settle()
        before = self._clock()
        with display.phase(name):
            yield
        self.pace.forget()
        self._since = self._clock()
        self._pause = self._since - before

    def add(
        self,
        step: int,
        metrics: Mapping[str, Any],
        positions: int = 0,
        flops: float = 0.0,
        data_wait: float = 0.0,
    ) -> None:
        """Takes the `metrics` of step number `step`, counted from 1.

        They are those of `make_train_step`; `positions` is the number of target positions of the
        batch, padding included (0: not known); `flops` the FLOPs of the step; `data_wait` the
        seconds that it waited for its batch.
        """
        self.settle()
        self._pending = _Step(step, metrics, positions, flops, data_wait, self._compiles)
        self._compiles = False

    def settle(self) -> None:
        """Waits for the last added step and logs it; before saving, so that no line is missing.

        A loss or gradient that is not finite is not logged. Raises `Diverged` when too many steps
        in a row had one.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        step, before = pending.number, self._clock()
        raise_if_diverged(step, pending.metrics)  # waits for the devices
        numbers = {name: float(value) for name, value in pending.metrics.items()}
        tokens = numbers.pop("tokens")
        numbers.pop("consecutive_skips")
        skipped = int(numbers["skipped"])
        if not skipped:
            del numbers["skipped"]
        for name in numbers.keys() - set(STEP_STATISTICS):  # the loss and its auxiliary sums
            numbers[name] /= max(tokens, 1.0)
        if self._learning_rates is not None:  # a skipped step is no update
            numbers["learning_rate"] = float(self._learning_rates[max(step - 1 - skipped, 0)])
        if pending.positions:
            numbers["padding"] = 1.0 - tokens / pending.positions
        self._sums.device_wait += self._clock() - before
        self._count(pending, tokens)
        speeds = self._sums.speeds(self._peak)
        due = self._log_every > 0 and step % self._log_every == 0 or step == self._total
        self._used = self._memory() if due else self._used
        self._show(step, numbers, speeds, due)
        if due:
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            if self._log is not None:
                self._log.log(step, **finite, **speeds, **self._used)
            sums, self._sums = self._sums, _Sums()
            if sums.steps and self._together:
                waits = sums.device_wait / sums.steps, sums.data_wait / sums.steps
                self.pace.compare_hosts(*waits, sums.seconds / sums.steps)

    def show_scores(self, line: str, best: str, samples: Sequence[Sample] = ()) -> None:
        """Prints the scores of an evaluation, and shows the best one and `samples`."""
        display.say(line)
        self._view = self._view._replace(best=best, samples=samples)
        if samples and not has_room(*self._screen.size):
            display.say("\n".join(sample_lines(samples)))
        self._refresh()

    def _count(self, pending: _Step, tokens: float) -> None:
        """Counts the step that has just ended, unless it was compiled."""
        now = self._clock()
        if pending.compiled:
            self.pace.forget()
            self._since = now if self._since is None else self._since
            return
        assert self._since is not None  # the first step is one that compiles
        seconds, self._since = now - self._since, now
        self.pace.add(pending.number, seconds, pending.data_wait)
        sums = self._sums
        sums.steps += 1
        sums.seconds += seconds
        sums.tokens += tokens
        sums.flops += pending.flops
        sums.data_wait += pending.data_wait

    def _left(self, step: int) -> float | None:
        """The seconds to the end, as far as they can be known after `step`."""
        if not self.pace.recent:
            return None
        left = (self._total - step) * sum(self.pace.recent) / len(self.pace.recent)
        if self._pause is not None:
            every = self._pause_every
            left += self._pause * (self._total // every - step // every + 2)
        return left

    def _show(
        self, step: int, numbers: dict[str, float], speeds: dict[str, float], logged: bool
    ) -> None:
        speed = speeds.get("tokens_per_second")
        words = [f"loss {numbers['loss']:.4f}"]
        words.append(f"tokens/s {'-' if speed is None else format(speed, ',.0f')}")
        words += [f"{speeds['mfu']:.1%} mfu"] if "mfu" in speeds else []
        words += [f"padding {numbers['padding']:.1%}"] if "padding" in numbers else []
        if "memory" in self._used:
            words.append(f"memory {self._used['memory'] / 1e9:.2f} GB")
        unknown = self._pause is None and 0 < self._pause_every and step < self._total
        self._view = self._view._replace(
            step=step, numbers="  ".join(words), left=self._left(step), without_pauses=unknown
        )
        self._refresh()
        now = self._clock()
        self._unprinted = self._view.line
        if logged if self._screen.live else now - self._printed >= self._every:
            self._printed = now
            self._print()

    def _print(self) -> None:
        display.say(self._unprinted)
        self._unprinted = ""

    def _refresh(self) -> None:
        self._screen.view = partial(render, self._view)

    def __enter__(self) -> "Progress":
        self._screen = self._stack.enter_context(display.opened(self._stream))
        jax.monitoring.register_event_duration_secs_listener(self.pace.hear)
        self._stack.callback(jax.monitoring.unregister_event_duration_listener, self.pace.hear)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._together = False
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt | SystemExit):
                self.settle()
            if self._unprinted:
                self._print()
        finally:
            self._screen.view = None
            self._stack.close()


class View(NamedTuple):
    """The last finished step of a training, and what led there."""

    step: int
    total: int
    numbers: str
    left: float | None
    best: str = ""
    samples: Sequence[Sample] = ()
    without_pauses: bool = False
    """Whether `left` lacks the evaluations, because there was none yet."""

    @property
    def time_left(self) -> str:
        """The time to the end, as far as it is known."""
        more = " + evaluations" if self.without_pauses and self.left is not None else ""
        return f"left {duration(self.left)}{more}"

    @property
    def line(self) -> str:
        """The state in one line."""
        return f"step {self.step}/{self.total}  {self.numbers}  {self.time_left}"


def has_room(width: int, height: int) -> bool:
    """Whether a terminal of this size shows the panel."""
    return width >= WIDE and height >= HIGH


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, or "-" where they are not known."""
    return "-" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def render(view: View, width: int, height: int) -> Any:
    """The panel for a terminal of this size, or the line where the terminal is too small."""
    text = optional_dependencies.load("rich.text").Text
    if not has_room(width, height):
        return text(view.line[: width - 1])
    inner = width - 4
    rows = [_bar(view, inner), text("  ".join(filter(None, (view.numbers, view.best))))]
    for line in sample_lines(view.samples):
        rows.append(text(line[:inner], style="green" if line.startswith("  model") else ""))
    group = optional_dependencies.load("rich.console").Group(*rows)
    title = f"step {view.step:,} of {view.total:,}"
    return optional_dependencies.load("rich.panel").Panel(group, title=title, width=width)


def _bar(view: View, width: int) -> Any:
    """The share that is done, as a bar with the time left."""
    share = view.step / view.total
    tail = f" {share:4.0%}  {view.time_left}"
    length = width - len(tail)
    done = round(share * length)
    text = optional_dependencies.load("rich.text").Text
    return text.assemble(("━" * done, "cyan"), ("─" * (length - done), "dim"), tail)
