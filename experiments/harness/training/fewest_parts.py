"""The fewest parts of a batch whose step fits a GPU's memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from experiments.harness.training.experiment_config import ExperimentConfig
from experiments.harness.training.task import MakeStep
from jaxformer.distributed import Strategy
from jaxformer.distributed.device_memory import device_memory

MEMORY_SHARE = 0.9
"""The share of a device's memory that a step may take: its programs are not alone there."""


def step_memory(
    config: ExperimentConfig,
    make_step: MakeStep,
    model: Any,
    batch: Any,
    devices: Strategy,
    parts: int,
) -> float:
    """The bytes that each of `devices` needs for a step in `parts` of `batch`, as compiled."""
    training = replace(config.training, grad_accumulation=parts * devices.num_shards)
    make_state, step = make_step(replace(config, training=training), model, batch, devices)
    shapes = devices.abstract(make_state), devices.abstract_batch(batch, parts)
    counted: Any = step.lower(*shapes).compile().memory_analysis()
    return counted.argument_size_in_bytes + counted.temp_size_in_bytes


def gpu_memory(devices: Strategy) -> float | None:
    """The bytes of each of `devices`; None where they are no GPUs."""
    device = devices.mesh.local_devices[0]
    return device_memory(device) if device.platform == "gpu" else None


def fewest_parts(memory_of: Callable[[int], float], limit: float, rows: int, most: int) -> int:
    """The least divisor of `rows`, at most `most`, with which a step needs at most `limit` bytes.

    `memory_of(parts)` are the bytes of a step, a constant and what each row of a part adds; it is
    asked twice. Where even `most` parts need more, these are the result.
    """
    divisors = [parts for parts in range(1, most + 1) if rows % parts == 0]
    if rows == 0 or len(divisors) < 2:  # nothing to choose from
        return divisors[-1]
    *_, fewer, most = divisors
    sizes = rows / fewer, rows / most
    bytes_of_fewer, bytes_of_most = memory_of(fewer), memory_of(most)
    each_row = (bytes_of_fewer - bytes_of_most) / (sizes[0] - sizes[1])
    fits = (x for x in divisors if bytes_of_most + each_row * (rows / x - sizes[1]) <= limit)
    return next(fits, most)
