"""Progress of a training: a step makes one dict of numbers, which is logged and shown."""

import datetime
import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float

from experiments.harness.cli import display
from experiments.harness.runs import distributed
from jaxformer.distributed.mesh import Device
from jaxformer.training.train_step import STEP_STATISTICS, raise_if_diverged

_RECENT = 100
"""Steps whose median a slow step is compared with, and whose mean tells the time left."""
_TIMES, _AT_LEAST, _FEWEST = 3.0, 1.0, 10
"""A slow step takes so many medians and so many seconds more than one, after so many steps."""
_LAG = 0.1
"""The share of a step that all other hosts wait for one that lags."""
_COMPILED = "/jax/core/compile/backend_compile_duration"
_QUIET = 300.0  # seconds between two lines about slow steps, and about hosts


def memory_in_use(devices: Sequence[Device] | None = None) -> dict[str, float]:
    """Bytes in use, and the most so far, on the fullest of this process's devices.

    {} where the backend does not count, as on a CPU. None: all devices of this process.
    """
    counts = [device.memory_stats() or {} for device in devices or jax.local_devices()]
    names = {"memory": "bytes_in_use", "memory_peak": "peak_bytes_in_use"}
    return {
        name: float(max(count[key] for count in counts))
        for name, key in names.items()
        if all(key in count for count in counts)
    }


class _Step(NamedTuple):
    """The arguments of `Progress.add`, and whether the step was compiled first."""

    number: int
    metrics: Mapping[str, Any]
    positions: int
    flops: float
    data_wait: float
    compiled: bool


class Progress:
    """Logs every `log_every`-th step of `total` (0: only the last), and shows all on the screen.

    A step is fetched from the device when the next one has been dispatched: the next batch is built
    and sent while the device computes this one. `log` gets the number of the step and its numbers,
    which depend on this step alone, except for the speed: a resumed run logs the same. The speed is
    that of the steps alone: the first step of each shape of batch, which compiles, and what is done
    within `pause` are left out. The time left counts the pauses to come, one every `pause_every`
    steps and two at the end, each as long as the last one without what was compiled in it.
    """

    def __init__(
        self,
        total: int,
        log: Callable[[int, Mapping[str, float]], None],
        *,
        log_every: int,
        pause_every: int = 0,
        learning_rates: Float[np.ndarray, " updates"] | None = None,
        peak: float | None = None,
        memory: Callable[[], Mapping[str, float]] = memory_in_use,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`learning_rates` are those of all updates, `peak` the FLOP/s of all devices together."""
        self._total, self._log = total, log
        self._log_every, self._pause_every = log_every, pause_every
        self._learning_rates, self._peak, self._memory = learning_rates, peak, memory
        self._stream, self._clock = stream, clock
        self._stack = ExitStack()
        self._pending: _Step | None = None
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._compiles = True  # whether the step to be added was compiled first
        self._since: float | None = None  # when the last step, compilation or pause ended
        self._sums: defaultdict[str, float] = defaultdict(float)  # since the last logged step
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of the last steps
        self._causes: defaultdict[str, float] = defaultdict(float)  # seconds lost by the next step
        self._pause: float | None = None
        self._compares_hosts = distributed.is_several()
        self._said = {"step": -math.inf, "host": -math.inf}

    def announce(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """`step`, a function of (state, batch), which says when it compiles.

        It does for the first batch of each shape, and waits for the result.
        """

        def announced(state: Any, batch: Any) -> Any:
            shape = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
            if shape in self._shapes:
                before = self._clock()
                result = step(state, batch)  # may wait for other hosts
                self._sums["device_wait"] += self._clock() - before
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
        self._causes.clear()
        before = self._clock()
        with display.phase(name):
            yield
        self._since = self._clock()
        self._pause = self._since - before - self._causes["compiling"]
        self._causes.clear()

    @contextmanager
    def held_up(self, cause: str) -> Iterator[None]:
        """Within it `cause` holds the next step up."""
        start = self._clock()
        yield
        self._causes[cause] += self._clock() - start

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
        self._sums["device_wait"] += self._clock() - before
        tokens = float(pending.metrics["tokens"])
        self._count(pending, tokens)
        numbers = self._of_step(pending, tokens) | self._speeds()
        if is_logged := self._log_every > 0 and step % self._log_every == 0 or step == self._total:
            numbers |= self._memory()
            self._log(step, {name: x for name, x in numbers.items() if math.isfinite(x)})
            if self._compares_hosts and self._sums["steps"]:
                self._compare_hosts()
            self._sums.clear()
        self._show(step, numbers, is_logged)

    def _of_step(self, pending: _Step, tokens: float) -> dict[str, float]:
        """The numbers that depend on the step alone."""
        numbers = {name: float(value) for name, value in pending.metrics.items()}
        del numbers["tokens"], numbers["consecutive_skips"]
        skipped = int(numbers["skipped"])
        if not skipped:
            del numbers["skipped"]
        for name in numbers.keys() - set(STEP_STATISTICS):  # the loss and its auxiliary sums
            numbers[name] /= max(tokens, 1.0)
        if self._learning_rates is not None:  # a skipped step is no update
            update = max(pending.number - 1 - skipped, 0)
            numbers["learning_rate"] = float(self._learning_rates[update])
        if pending.positions:
            numbers["padding"] = 1.0 - tokens / pending.positions
        return numbers

    def _speeds(self) -> dict[str, float]:
        """Tokens per second, mean wait for a batch, and share of the peak FLOP/s; {} at first."""
        sums = self._sums
        if sums["seconds"] <= 0.0:
            return {}
        speeds = {"tokens_per_second": sums["tokens"] / sums["seconds"]}
        speeds["data_wait"] = sums["data_wait"] / sums["steps"]
        mfu = {} if self._peak is None else {"mfu": sums["flops"] / sums["seconds"] / self._peak}
        return speeds | mfu

    def _count(self, pending: _Step, tokens: float) -> None:
        """Counts the step that has just ended, unless it was compiled; says if it was slow."""
        now = self._clock()
        causes = {**self._causes, "waiting for its batch": pending.data_wait}
        self._causes.clear()
        if pending.compiled:
            self._since = now if self._since is None else self._since
            return
        assert self._since is not None  # the first step is one that compiles
        seconds, self._since = now - self._since, now
        counted = {"steps": 1, "seconds": seconds, "tokens": tokens, "flops": pending.flops}
        for name, number in (counted | {"data_wait": pending.data_wait}).items():
            self._sums[name] += number
        median = statistics.median(self._recent) if len(self._recent) >= _FEWEST else math.inf
        if seconds > max(_TIMES * median, median + _AT_LEAST):
            cause, longest = max(causes.items(), key=itemgetter(1))
            is_known = longest > (seconds - median) / 2
            self._seldom(
                "step",
                f"slow: step {pending.number} took {seconds:.1f} s, the median is {median:.2g} s: "
                + (f"{cause} took {longest:.1f} s" if is_known else "unknown cause"),
            )
        self._recent.append(seconds)

    def _compare_hosts(self) -> None:
        """Says which host lags; all call it together, with means of their steps in seconds."""
        sums = self._sums
        mine = np.array([sums["device_wait"], sums["data_wait"]], np.float32) / sums["steps"]
        waits = multihost_utils.process_allgather(mine)
        if lags := lagging(waits, sums["seconds"] / sums["steps"]):
            self._seldom("host", lags)

    def _seldom(self, kind: str, text: str) -> None:
        """Says `text` unless another one of its `kind` was said in the last five minutes."""
        if self._clock() - self._said[kind] >= _QUIET:
            self._said[kind] = self._clock()
            display.say(text)

    def _left(self, step: int) -> list[str]:
        """The time to the end, as far as it can be known after `step`; [] at first."""
        if not self._recent:
            return []
        left = (self._total - step) * sum(self._recent) / len(self._recent)
        if self._pause is not None:
            every = self._pause_every
            left += self._pause * (self._total // every - step // every + 2)
        text = str(datetime.timedelta(seconds=round(left)))
        unknown = self._pause is None and 0 < self._pause_every <= self._total
        return [f"left {text}", *["without evaluations"] * unknown]

    def _show(self, step: int, numbers: Mapping[str, float], is_logged: bool) -> None:
        words = [f"step {step}/{self._total}", f"loss {numbers['loss']:.4f}", *self._left(step)]
        if "tokens_per_second" in numbers:
            words.append(f"tokens/s {numbers['tokens_per_second']:,.0f}")
        if "mfu" in numbers:
            words.append(f"{numbers['mfu']:.1%} mfu")
        if "memory" in numbers:
            words.append(f"memory {numbers['memory'] / 1e9:.2f} GB")
        self._phase.show(words, step, self._total)
        if is_logged:
            display.say(display.fitting(words, self._screen.width))

    def _hear(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            self._causes["compiling"] += duration_secs

    def __enter__(self) -> "Progress":
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        self._stack.callback(jax.monitoring.unregister_event_duration_listener, self._hear)
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


def lagging(waits: Float[np.ndarray, "hosts 2"], seconds: float) -> str:
    """The host for which all others wait, or "": the one that waited least for its devices.

    `waits` are mean seconds that each host waited for the result of a step and for its batch,
    `seconds` those of a whole step.
    """
    on_devices, on_batches = np.asarray(waits, np.float64).T
    host = int(np.argmin(on_devices))
    others = float(np.min(np.delete(on_devices, host)))
    gap = others - on_devices[host]
    if gap < _LAG * seconds:
        return ""
    late = on_batches[host] > gap / 2
    why = f"{on_batches[host]:.2g} s for its batch" if late else "not for its batches"
    return (
        f"host {host} of {len(waits)} lags: in a step of {seconds:.2g} s it waited "
        f"{on_devices[host]:.2g} s for its devices, {why}; the others waited {others:.2g} s or more"
    )
