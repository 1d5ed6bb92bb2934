"""The pace of a training: seconds of its steps, what slows one, which host lags, the time left."""

import datetime
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float

_RECENT = 100
"""The last steps: their median is compared with a slow step, their mean tells the time left."""
_SLOW_RATIO = 3.0
"""A slow step takes more than this many times the median of the last steps..."""
_SLOW_SECONDS = 1.0
"""...and this many seconds more than it."""
_FEWEST_STEPS = 10
"""Steps after which the median is known well enough to call one slow."""
_LAG = 0.1
"""A host lags if all others wait for it for at least this share of a step."""
_COMPILED = "/jax/core/compile/backend_compile_duration"
"""The event by which JAX tells how long a compilation took."""


class Pace:
    """The seconds of the steps since the last logged one, and of the last hundred steps.

    A step that compiles does not count, nor does what is done within `pause`. Within `with`, JAX
    tells it how long compilations take.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.sums: defaultdict[str, float] = defaultdict(float)
        """steps, seconds, tokens, flops and waits since the last logged step."""
        self._since: float | None = None  # when the last step, compilation or pause ended
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of the last steps
        self._causes: defaultdict[str, float] = defaultdict(float)  # seconds lost by the next step
        self._pause: float | None = None  # seconds of the last pause

    def __enter__(self) -> "Pace":
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def restart(self) -> None:
        """The next step begins now."""
        self._since = self.clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In its block this host waits for its devices."""
        before = self.clock()
        yield
        self.sums["device_wait"] += self.clock() - before

    @contextmanager
    def pause(self) -> Iterator[None]:
        """In its block something other than steps is done, such as an evaluation."""
        self._causes.clear()
        before = self.clock()
        yield
        self._since = self.clock()
        self._pause = self._since - before - self._causes["compiling"]
        self._causes.clear()

    @contextmanager
    def held_up(self, cause: str) -> Iterator[None]:
        """In its block `cause` holds up the next step."""
        before = self.clock()
        yield
        self._causes[cause] += self.clock() - before

    def skip_step(self) -> None:
        """Ends a step that was compiled first, and does not count it."""
        self._causes.clear()
        if self._since is None:
            self.restart()

    def end_step(self, number: int, *, tokens: float, flops: float, data_wait: float) -> str:
        """Counts step `number`, which has just ended; a sentence if it was slow, else ""."""
        causes = {**self._causes, "waiting for its batch": data_wait}
        self._causes.clear()
        assert self._since is not None  # the first step is one that compiles
        now = self.clock()
        seconds, self._since = now - self._since, now
        self.sums["steps"] += 1
        self.sums["seconds"] += seconds
        self.sums["tokens"] += tokens
        self.sums["flops"] += flops
        self.sums["data_wait"] += data_wait
        median = math.inf
        if len(self._recent) >= _FEWEST_STEPS:
            median = statistics.median(self._recent)
        self._recent.append(seconds)
        if seconds <= max(_SLOW_RATIO * median, median + _SLOW_SECONDS):
            return ""
        cause, lost = max(causes.items(), key=itemgetter(1))
        reason = "unknown cause"
        if lost > (seconds - median) / 2:
            reason = f"{cause} took {lost:.1f} s"
        return f"slow: step {number} took {seconds:.1f} s, the median is {median:.2g} s: {reason}"

    def speeds(self, peak: float | None) -> dict[str, float]:
        """Tokens per second, mean wait for a batch, and share of `peak` FLOP/s; {} at first."""
        if self.sums["seconds"] <= 0.0:
            return {}
        speeds = {
            "tokens_per_second": self.sums["tokens"] / self.sums["seconds"],
            "data_wait": self.sums["data_wait"] / self.sums["steps"],
        }
        if peak is not None:
            speeds["mfu"] = self.sums["flops"] / self.sums["seconds"] / peak
        return speeds

    def compare_hosts(self) -> str:
        """A sentence about the host that lags, or ""; all call it together, with their means."""
        if not self.sums["steps"]:
            return ""
        mine = np.array([self.sums["device_wait"], self.sums["data_wait"]], np.float32)
        waits = multihost_utils.process_allgather(mine / self.sums["steps"])
        return lagging(waits, self.sums["seconds"] / self.sums["steps"])

    def left(self, step: int, total: int, pause_every: int) -> list[str]:
        """Words such as "left 0:01:40", estimated after `step` of `total`; [] before any is timed.

        Before the first pause they are "left 0:01:40 + evaluations".

        The pauses to come are one every `pause_every` steps and two at the end. Each is taken to be
        as long as the last one, without the time that was spent compiling in it.
        """
        if not self._recent:
            return []
        seconds = (total - step) * sum(self._recent) / len(self._recent)
        if self._pause is not None:
            pauses = total // pause_every - step // pause_every + 2
            seconds += self._pause * pauses
        words = f"left {datetime.timedelta(seconds=round(seconds))}"
        if self._pause is None and 0 < pause_every <= total:
            words += " + evaluations"
        return [words]

    def _hear(self, event: str, duration_secs: float, **_: object) -> None:
        if event == _COMPILED:
            self._causes["compiling"] += duration_secs


def lagging(waits: Float[np.ndarray, "hosts 2"], seconds: float) -> str:
    """The host for which all others wait, or "": the one that waited least for its devices.

    `waits` are mean seconds that each host waited for the result of a step and for its batch,
    `seconds` the mean of a whole step.
    """
    device_waits, batch_waits = np.asarray(waits, np.float64).T
    host = int(np.argmin(device_waits))
    next_shortest = float(np.min(np.delete(device_waits, host)))
    gap = next_shortest - device_waits[host]
    if gap < _LAG * seconds:
        return ""
    cause = "not for its batches"
    if batch_waits[host] > gap / 2:
        cause = f"{batch_waits[host]:.2g} s for its batch"
    return (
        f"host {host} of {len(waits)} lags: in a step of {seconds:.2g} s it waited "
        f"{device_waits[host]:.2g} s for its devices, {cause}; the others waited "
        f"{next_shortest:.2g} s or more"
    )
