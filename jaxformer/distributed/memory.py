"""The memory of devices, compared with the size of a state before it is created there."""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxformer.distributed.mesh import Device
from jaxformer.errors import ConfigError

# The limits of the control group that this process is in, of either version of Linux's.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def check_fits(state: Any) -> None:
    """Raises `ConfigError` if a device of this process has less memory than its part of `state`.

    `state` is a tree of `jax.ShapeDtypeStruct` with shardings. Without this check XLA takes minutes
    to fail, and on a CPU hangs.
    """
    leaves = jax.tree.leaves(state)
    size = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    devices = {d for x in leaves for d in x.sharding.device_set}
    here = [d for d in devices if d.process_index == jax.process_index()]
    limits = [limit for device in here if (limit := device_memory(device, len(here)))]
    if limits and size > min(limits):
        raise ConfigError(
            f"the state needs {_bytes(size)} on each device, which has {_bytes(min(limits))}: give "
            "a smaller model, or shard it over more devices (--strategy sharded --mesh fsdp=N)"
        )


def device_memory(device: Device, count: int = 1) -> float | None:
    """The bytes that `device` may use, one of `count` of this process; None: not known."""
    if device.platform == "cpu":
        total = host_memory()
        return total and total / count
    return (device.memory_stats() or {}).get("bytes_limit")


def host_memory() -> int | None:
    """The bytes of memory of this machine, or of the container of this process; None: not known."""
    if not hasattr(os, "sysconf"):
        return None
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # there is no such group, or it has no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


def _bytes(size: float) -> str:
    power = min(int(math.log(max(size, 1), 1000)), len(_UNITS) - 1)
    return f"{size / 1000**power:.3g} {_UNITS[power]}"
