"""Slow steps and lagging hosts, each said in a line with its cause where that is known."""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Float

from experiments.harness.cli import display
from experiments.harness.runs import distributed

_RECENT = 100
"""Steps whose median a slow step is compared with, and whose mean tells the time left."""
_TIMES, _AT_LEAST = 3.0, 1.0
"""A slow step takes so many medians, and so many seconds more than one."""
_FEWEST = 10  # steps before which no step is slow
_QUIET = 300.0  # seconds between two lines of a kind
_COMPILED = "/jax/core/compile/backend_compile_duration"
_LAG = 0.1
"""The share of a step that all other hosts wait for one that lags."""


class Pace:
    """Says which step is slow, and which of several hosts lags; seldom more than once in 5 minutes.

    `recent` are the seconds of the last steps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self._clock = clock
        self._causes: defaultdict[str, float] = defaultdict(float)  # seconds since the last step
        self._said: dict[str, float] = {"step": -float("inf"), "host": -float("inf")}

    @contextmanager
    def doing(self, cause: str) -> Iterator[None]:
        """Within it the next step is held up by `cause`."""
        start = self._clock()
        yield
        self._causes[cause] += self._clock() - start

    def hear(self, event: str, duration_secs: float, **_: Any) -> None:
        """Notes what JAX compiles: a listener for `jax.monitoring`."""
        if event == _COMPILED:
            self._causes["compiling"] += duration_secs

    def forget(self) -> None:
        """What held a step up that is not counted, as the first of a shape, is no cause."""
        self._causes.clear()

    def add(self, step: int, seconds: float, data_wait: float) -> None:
        """A step has ended after `seconds`, of which it waited `data_wait` for its batch."""
        causes = {**self._causes, "waiting for its batch": data_wait}
        self.forget()
        if len(self.recent) >= _FEWEST:
            usual = statistics.median(self.recent)
            lost = seconds - usual
            if seconds > _TIMES * usual and lost > _AT_LEAST:
                cause, duration = max(causes.items(), key=lambda item: item[1])
                known = f"{cause} took {duration:.1f} s" if duration > lost / 2 else "unknown cause"
                self._say(
                    "step",
                    f"slow: step {step} took {seconds:.1f} s, the median of the last "
                    f"{len(self.recent)} is {usual:.2g} s: {known}",
                )
        self.recent.append(seconds)

    def compare_hosts(self, device_wait: float, data_wait: float, seconds: float) -> None:
        """Says which host lags; all call it together, with means of their steps in seconds."""
        if distributed.is_several():
            mine = np.array([device_wait, data_wait], np.float32)
            said = lagging(multihost_utils.process_allgather(mine), seconds)
            if said:
                self._say("host", said)

    def _say(self, kind: str, text: str) -> None:
        now = self._clock()
        if now - self._said[kind] >= _QUIET:
            self._said[kind] = now
            display.say(text)


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
