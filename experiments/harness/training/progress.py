"""Progress of a training: each step makes one dict of numbers, which is logged and shown."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

import jax
import numpy as np
from jaxtyping import Float

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from experiments.harness.training.pace import Pace
from experiments.harness.training.step_numbers import FinishedStep, memory_in_use, numbers_of
from jaxformer.training.train_step import raise_if_diverged

_QUIET = 300.0
"""Seconds between two lines about slow steps, and between two about hosts."""


class Progress:
    """Logs every `log_every`-th step of `total` (0: only the last), and shows all on the screen.

    A step is fetched from the device when the next one has been dispatched: the next batch is built
    and sent while the device computes this one. Without `runs_ahead` the next one waits for it: a
    CPU holds the temporary memory of every step that has been dispatched. `log` gets the number of
    the step and its numbers, which depend on this step alone, except for the speed: a resumed run
    logs the same. The speed counts steps alone, without the first one of each shape of batch, which
    compiles, and without what is done within `pause`. The time left counts the pauses to come, one
    every `pause_every` steps and two at the end.
    """

    def __init__(
        self,
        total: int,
        log: Callable[[int, Mapping[str, float]], None],
        *,
        log_every: int,
        runs_ahead: bool = True,
        pause_every: int = 0,
        learning_rates: Float[np.ndarray, " updates"] | None = None,
        peak: float | None = None,
        memory: Callable[[], Mapping[str, float]] = memory_in_use,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`learning_rates` has each update's rate, `peak` is the FLOP/s of all devices together."""
        self._total, self._log = total, log
        self._log_every, self._pause_every = log_every, pause_every
        self._runs_ahead = runs_ahead
        self._learning_rates, self._peak, self._memory = learning_rates, peak, memory
        self._stream, self._clock = stream, clock
        self._pace = Pace(clock)
        self._stack = ExitStack()
        self._pending: FinishedStep | None = None
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._compiles = True  # whether the step to be added was compiled first
        self._compares_hosts = distributed.is_several()
        self._said = {"step": -math.inf, "host": -math.inf}

    def announce(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, a function of (state, batch), which says when it compiles.

        It does for the first batch of each shape, and waits for the result.
        """

        def announced(state: Any, batch: Any) -> Any:
            shape = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
            if shape in self._shapes:
                if not self._runs_ahead:
                    self.settle()
                with self._pace.waiting():  # perhaps for other hosts
                    return step(state, batch)
            self.settle()
            self._shapes.add(shape)
            self._compiles = True
            with display.phase(f"compiling the step, shape {len(self._shapes)} of batch"):
                result = jax.block_until_ready(step(state, batch))
            self._pace.restart()
            return result

        return announced

    @contextmanager
    def pause(self, name: str) -> Iterator[None]:
        """Within it something else is done than steps, which the screen calls `name`."""
        self.settle()
        with self._pace.pause(), display.phase(name):
            yield

    def held_up(self, cause: str) -> Any:
        """A context in which `cause` holds the next step up."""
        return self._pace.held_up(cause)

    def add(
        self,
        step: int,
        metrics: Mapping[str, Any],
        positions: int = 0,
        flops: float = 0.0,
        data_wait: float = 0.0,
    ) -> None:
        """Takes the `metrics` of step number `step`; see `FinishedStep`."""
        self.settle()
        self._pending = FinishedStep(step, metrics, positions, flops, data_wait, self._compiles)
        self._compiles = False

    def settle(self) -> None:
        """Waits for the last added step and logs it; before saving, so that no line is missing.

        A loss or gradient that is not finite is not logged. Raises `Diverged` when too many steps
        in a row had one.
        """
        if self._pending is None:
            return
        step, self._pending = self._pending, None
        with self._pace.waiting():
            raise_if_diverged(step.number, step.metrics)  # waits for the devices
        self._count(step)
        numbers = numbers_of(step, self._learning_rates) | self._pace.speeds(self._peak)
        at_interval = self._log_every > 0 and step.number % self._log_every == 0
        is_logged = at_interval or step.number == self._total
        if is_logged:
            numbers |= self._memory()
            finite = {name: x for name, x in numbers.items() if math.isfinite(x)}
            with self.held_up("logging"):
                self._log(step.number, finite)
            if self._compares_hosts:
                self._say_seldom("host", self._pace.compare_hosts())
            self._pace.sums.clear()
        self._show(step.number, numbers, is_logged)

    def _count(self, step: FinishedStep) -> None:
        """Counts the step that has just ended, unless it was compiled; says if it was slow."""
        if step.compiled:
            self._pace.skip_step()
            return
        tokens = float(step.metrics["tokens"])
        slow = self._pace.end_step(
            step.number, tokens=tokens, flops=step.flops, data_wait=step.data_wait
        )
        self._say_seldom("step", slow)

    def _say_seldom(self, kind: str, text: str) -> None:
        """Says `text` unless another one of its `kind` was said in the last five minutes."""
        if text and self._clock() - self._said[kind] >= _QUIET:
            self._said[kind] = self._clock()
            display.say(text)

    def _show(self, step: int, numbers: Mapping[str, float], is_logged: bool) -> None:
        words = [f"step {step}/{self._total}", f"loss {numbers['loss']:.4f}"]
        words += self._pace.left(step, self._total, self._pause_every)
        if "tokens_per_second" in numbers:
            words.append(f"tokens/s {numbers['tokens_per_second']:,.0f}")
        if "mfu" in numbers:
            words.append(f"{numbers['mfu']:.1%} mfu")
        if "memory" in numbers:
            words.append(f"memory {numbers['memory'] / 1e9:.2f} GB")
        self._phase.show(words, step, self._total)
        if is_logged:
            display.say(display.fitting(words, self._screen.width))

    def __enter__(self) -> "Progress":
        self._stack.enter_context(self._pace)
        self._screen = self._stack.enter_context(display.opened(self._stream))
        self._phase = self._stack.enter_context(self._screen.phase("training"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self._compares_hosts = False  # others may not come so far
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt | SystemExit):
                self.settle()
        finally:
            self._stack.__exit__(kind, *error)
