"""How training is going: the numbers of each step, logged and shown."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from jaxtyping import Float

from experiments.harness.cli import display
from experiments.harness.runs.run_folder import Run
from experiments.harness.training import training_view
from experiments.harness.training.training_view import Sample, View
from jaxformer.training.gradients import NOT_SUMS
from jaxformer.training.train_step import raise_if_diverged

_RECENT = 100
"""Steps whose mean time the estimate is made of."""


class _Step(NamedTuple):
    """What `add` takes, and whether the step was compiled first."""

    number: int
    metrics: Mapping[str, Any]
    positions: int
    flops: float
    data_wait: float
    compiled: bool


class _Counted(NamedTuple):
    """Sums over the steps so far that were not compiled first."""

    tokens: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    data_wait: float = 0.0
    steps: int = 0


class Progress:
    """Logs every `log_every`-th step of `total` (0: only the last), and shows how far training is.

    On a terminal it is a live area, with a line above it for each logged step; elsewhere a line
    every `every` seconds. A step is fetched from the device when the next one has been dispatched:
    the next batch is built and sent while the device computes this one. What is logged of a step
    depends on this step alone, except for the speed: a resumed run logs the same.
    `learning_rates` are those of all updates. `peak` is the FLOP/s that the devices can do
    together; with it `mfu` is logged, the share of it that the steps' FLOPs made since the last
    logged step. `data_wait` is the mean time in seconds that a step waited for its batch.

    The speed is that of the steps alone: the first step of each shape of batch, which compiles,
    and what is done within `pause` are left out. The estimate of the time left counts the pauses
    to come, one every `pause_every` steps and two at the end, each as long as the last one.
    """

    def __init__(
        self,
        total: int,
        run: Run,
        *,
        log_every: int,
        pause_every: int = 0,
        learning_rates: Float[np.ndarray, " updates"] | None = None,
        peak: float | None = None,
        every: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total = total
        self._run = run
        self._log_every = log_every
        self._pause_every = pause_every
        self._learning_rates = learning_rates
        self._peak = peak
        self._every = every
        self._stream = stream
        self._clock = clock
        self._stack = ExitStack()
        self._pending: _Step | None = None
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._compiles = True  # whether the step to be added was compiled first
        self._since: float | None = None  # when the last step, compilation or pause ended
        self._counted = self._logged = _Counted()
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._pause: float | None = None
        self._printed = -float("inf")
        self._unprinted = ""
        self._losses = training_view.Thinned()
        self._view = View(0, total, "", None, self._losses)

    def announce(self, step: Callable[..., Any], programs: int) -> Callable[..., Any]:
        """`step`, a function of (state, batch), which says when it compiles.

        It does for the first batch of each of `programs` shapes, and waits for the result.
        """

        def announced(state: Any, batch: Any) -> Any:
            shape = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
            if shape in self._shapes:
                return step(state, batch)
            self.settle()
            self._shapes.add(shape)
            self._compiles = True
            with display.phase(f"compiling shape {len(self._shapes)} of {programs}"):
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
        self._since = self._clock()
        self._pause = self._since - before

    def add(
        self,
        step: int,
        metrics: Mapping[str, Any],
        positions: int,
        flops: float = 0.0,
        data_wait: float = 0.0,
    ) -> None:
        """Takes what step number `step`, counted from 1, returned.

        `metrics` is what `make_train_step` gives of it; `positions` is the number of target
        positions of the batch, padding included; `flops` the FLOPs of the step; `data_wait` the
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
        step, metrics, positions, flops, data_wait, compiled = self._pending
        self._pending = None
        raise_if_diverged(step, metrics)
        numbers = {name: float(value) for name, value in metrics.items()}
        tokens = numbers.pop("tokens")
        numbers.pop("consecutive_skips")
        skipped = int(numbers["skipped"])
        if not skipped:
            del numbers["skipped"]
        for name in numbers.keys() - set(NOT_SUMS):  # the loss and its auxiliary sums
            numbers[name] /= max(tokens, 1.0)
        if self._learning_rates is not None:  # a skipped step is no update
            numbers["learning_rate"] = float(self._learning_rates[max(step - 1 - skipped, 0)])
        numbers["padding"] = 1.0 - tokens / positions
        self._count(tokens, flops, data_wait, compiled)
        speeds = self._speeds()
        due = self._log_every > 0 and step % self._log_every == 0 or step == self._total
        self._show(step, numbers, speeds, due)
        if due:
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            self._run.log(step, **finite, **speeds)
            self._logged = self._counted

    def show_scores(self, line: str, best: str, samples: Sequence[Sample] = ()) -> None:
        """Prints the scores of an evaluation, and shows the best one and `samples`."""
        display.say(line)
        self._view = self._view._replace(best=best, samples=samples)
        if not training_view.has_room(*self._screen.size):
            display.say("\n".join(training_view.sample_lines(samples)))
        self._refresh()

    def _count(self, tokens: float, flops: float, data_wait: float, compiled: bool) -> None:
        """Counts the step that has just ended, unless it was compiled."""
        now = self._clock()
        if compiled:
            self._since = now if self._since is None else self._since
            return
        assert self._since is not None  # the first step is one that compiles
        seconds, sums = now - self._since, self._counted
        self._since = now
        self._recent.append(seconds)
        self._counted = _Counted(
            sums.tokens + tokens,
            sums.flops + flops,
            sums.seconds + seconds,
            sums.data_wait + data_wait,
            sums.steps + 1,
        )

    def _speeds(self) -> dict[str, float]:
        """What is known of the time since the last logged step."""
        tokens, flops, seconds, data_wait, steps = (
            now - before for now, before in zip(self._counted, self._logged, strict=True)
        )
        if seconds <= 0.0:
            return {}
        speeds = {"tokens_per_second": tokens / seconds, "data_wait": data_wait / steps}
        if self._peak is not None:
            speeds["mfu"] = flops / seconds / self._peak
        return speeds

    def _left(self, step: int) -> float | None:
        """The seconds to the end, as far as they can be known after `step`."""
        if not self._recent:
            return None
        left = (self._total - step) * sum(self._recent) / len(self._recent)
        if self._pause is not None:
            every = self._pause_every
            left += self._pause * (self._total // every - step // every + 2)
        return left

    def _show(
        self, step: int, numbers: dict[str, float], speeds: dict[str, float], logged: bool
    ) -> None:
        speed = speeds.get("tokens_per_second")
        said = [
            f"loss {numbers['loss']:.4f}",
            f"tokens/s {'-' if speed is None else format(speed, ',.0f')}",
            *([f"{speeds['mfu']:.1%} mfu"] if "mfu" in speeds else []),
            f"padding {numbers['padding']:.1%}",
        ]
        self._view = self._view._replace(step=step, numbers="  ".join(said), left=self._left(step))
        self._losses.add(numbers["loss"])
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
        self._screen.view = partial(training_view.render, self._view)

    def __enter__(self) -> "Progress":
        self._screen = self._stack.enter_context(display.opened(self._stream))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt | SystemExit):
                self.settle()
            if self._unprinted:
                self._print()
        finally:
            self._screen.view = None
            self._stack.close()
