"""The memory of devices, and whether a state fits into it."""

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxformer.distributed.mesh import Device
from jaxformer.errors import ConfigError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""The files with the limit of this process's control group, by either version of Linux's."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def check_fits(state: Any) -> None:
    """Raises `ConfigError` if a device of this process has less memory than its part of `state`.

    `state` is a tree of `jax.ShapeDtypeStruct` with shardings. Without this check XLA takes minutes
    to fail, and on a CPU hangs.
    """
    leaves = jax.tree.leaves(state)
    size = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    devices = {device for leaf in leaves for device in leaf.sharding.device_set}
    local_devices = [each for each in devices if each.process_index == jax.process_index()]
    limits = [device_memory(device, len(local_devices)) for device in local_devices]
    least = min((limit for limit in limits if limit is not None), default=math.inf)
    if size > least:
        raise ConfigError(
            f"the state needs {_in_units(size)} on each device, which has {_in_units(least)}: give "
            "a smaller model, or shard it over more devices (--strategy sharded --mesh fsdp=N)"
        )


def device_memory(device: Device, count: int = 1) -> float | None:
    """The bytes that `device` may use, one of `count` of this process; None: not known."""
    if device.platform == "cpu":
        total = host_memory()
        return None if total is None else total / count
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


def _in_units(size: float) -> str:
    """`size` bytes as text, such as "39.1 TB"."""
    power = min(int(math.log(max(size, 1), 1000)), len(_UNITS) - 1)
    return f"{size / 1000**power:.3g} {_UNITS[power]}"
