"""How training is going: the numbers of each step, logged and shown."""

import datetime
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from experiments.harness import cli
from experiments.harness.run_folder import Run
from jaxformer import optional_dependencies
from jaxformer.training.train_step import raise_if_diverged


class Progress:
    """Logs every `log_every`-th step of `total` (0: only the last), and shows how far training is.

    On a terminal it is a bar, elsewhere a line every `every` seconds. A step is fetched from the
    device when the next one has been dispatched: the next batch is built and sent while the device
    computes this one. What is logged of a step depends on this step alone, except for the speed: a
    resumed run logs the same. `peak` is the FLOP/s that the devices can do together; with it `mfu`
    is logged, the share of it that the steps' FLOPs made since the last logged step.
    """

    def __init__(
        self,
        total: int,
        run: Run,
        *,
        log_every: int,
        peak: float | None = None,
        every: float = 30.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total = total
        self._run = run
        self._log_every = log_every
        self._peak = peak
        self._every = every
        self._stream = stream or sys.stdout
        self._clock = clock
        self._pending: tuple[int, Mapping[str, Any], int, float] | None = None
        self._first: tuple[int, float] | None = None
        self._window = (0.0, 0.0, 0.0)  # tokens, FLOPs and seconds at the last logged step
        self._tokens = self._flops = 0.0
        self._printed = -float("inf")
        self._line = ""
        self._bar = _bar(self._stream, total)

    def add(
        self, step: int, metrics: Mapping[str, Any], positions: int, flops: float = 0.0
    ) -> None:
        """Takes what step number `step`, counted from 1, returned.

        `metrics` is what `make_train_step` gives of it; `positions` is the number of target
        positions of the batch, padding included; `flops` the FLOPs of the step.
        """
        self.settle()
        self._pending = step, metrics, positions, flops

    def settle(self) -> None:
        """Waits for the last added step and logs it; before saving, so that no line is missing.

        A loss or gradient that is not finite is not logged. Raises `Diverged` when too many steps
        in a row had one.
        """
        if self._pending is None:
            return
        step, metrics, positions, flops = self._pending
        self._pending = None
        raise_if_diverged(step, metrics)
        numbers = {name: float(value) for name, value in metrics.items()}
        tokens = numbers.pop("tokens")
        numbers.pop("consecutive_skips")
        if not numbers["skipped"]:
            del numbers["skipped"]
        for name in numbers.keys() - {"grad_norm", "skipped"}:  # the loss and its auxiliary sums
            numbers[name] /= max(tokens, 1.0)
        numbers["padding"] = 1.0 - tokens / positions
        now = self._clock()
        if self._first is None:  # compilation ends with the first step
            self._first, self._window = (step, now), (0.0, 0.0, now)
        else:
            self._tokens += tokens
            self._flops += flops
        speeds = self._speeds(now)
        self._show(step, now, numbers, speeds)
        due = self._log_every > 0 and step % self._log_every == 0
        if due or step == self._total:
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
            self._run.log(step, **finite, **speeds)
            self._window = (self._tokens, self._flops, now)

    def _speeds(self, now: float) -> dict[str, float]:
        """What is known of the time since the last logged step."""
        tokens, flops, since = self._window
        if now <= since:
            return {}
        speeds = {"tokens_per_second": (self._tokens - tokens) / (now - since)}
        if self._peak is not None:
            speeds["mfu"] = (self._flops - flops) / (now - since) / self._peak
        return speeds

    def _show(self, step: int, now: float, numbers: dict, speeds: dict[str, float]) -> None:
        assert self._first is not None  # `add` sets it first
        first_step, since = self._first
        left = _ratio((self._total - step) * (now - since), step - first_step)
        speed = speeds.get("tokens_per_second")
        self._line = (
            f"step {step}/{self._total}  loss {numbers['loss']:.4f}  "
            f"tokens/s {'-' if speed is None else format(speed, ',.0f')}  "
            f"{format(speeds['mfu'], '.1%') + ' mfu  ' if 'mfu' in speeds else ''}"
            f"padding {numbers['padding']:.1%}  "
            f"left {'-' if left is None else datetime.timedelta(seconds=round(left))}"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=self._line)
        elif now - self._printed >= self._every:
            self._printed = now
            self._print()

    def _print(self) -> None:
        cli.say(self._line, self._stream)
        self._line = ""

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, KeyboardInterrupt | SystemExit):
                self.settle()
        finally:
            if self._bar is not None:
                self._bar.stop()
            elif self._line:
                self._print()


def _ratio(amount: float, per: float) -> float | None:
    return amount / per if per > 0 else None


def _bar(stream: TextIO, total: int) -> Any:
    """A rich progress bar where `stream` is a terminal and rich is installed, else None."""
    if not stream.isatty():
        return None
    try:
        progress, console = (
            optional_dependencies.load("rich.progress"),
            optional_dependencies.load("rich.console"),
        )
    except optional_dependencies.MissingExtra:
        return None
    # The bar takes what the numbers leave of the line.
    columns = progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=None)
    bar = progress.Progress(*columns, console=console.Console(file=stream), expand=True)
    bar.add_task("", total=total)
    return bar
