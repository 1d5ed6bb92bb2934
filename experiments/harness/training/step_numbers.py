"""Numbers of a training step for the log."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxformer.distributed.mesh import Device
from jaxformer.training.train_step import StepStatistics


class FinishedStep(NamedTuple):
    """A step that was dispatched, and its metrics, which may still be computed."""

    number: int
    """Its number, counted from 1."""
    metrics: Mapping[str, Any]
    """The metrics of `make_train_step`."""
    positions: int
    """Target positions of its batch, padding included; 0: not known."""
    flops: float
    data_wait: float
    """Seconds that it waited for its batch."""
    compiled: bool
    """Whether it was compiled first."""


def numbers_of(
    step: FinishedStep, learning_rates: Float[np.ndarray, " updates"] | None
) -> dict[str, float]:
    """The numbers that depend on the step alone: sums per token, norms, rate, share of padding."""
    numbers = {name: float(value) for name, value in step.metrics.items()}
    tokens = numbers.pop("tokens")
    del numbers["consecutive_skips"]
    skipped = int(numbers["skipped"])
    if not skipped:
        del numbers["skipped"]
    for name in numbers.keys() - set(StepStatistics._fields):  # the loss and its auxiliary sums
        numbers[name] /= max(tokens, 1.0)
    if learning_rates is not None:  # a skipped step is no update
        update = max(step.number - 1 - skipped, 0)
        numbers["learning_rate"] = float(learning_rates[update])
    if step.positions:
        numbers["padding"] = 1.0 - tokens / step.positions
    return numbers


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
