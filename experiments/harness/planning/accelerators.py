"""Accelerators to compile for, and virtual devices on the CPU."""

from typing import NamedTuple

import jax

from experiments.harness.training.utilization import ACCELERATORS, Accelerator
from jaxformer.errors import ConfigError

__all__ = ["ACCELERATORS", "GPUS", "TPUS", "Accelerator", "GpuSpec", "TpuCore", "start_devices"]


class TpuCore(NamedTuple):
    """What the time of a TPU's step is computed from.

    `clock` is in cycles per second: the peak FLOP/s / the FLOPs a cycle of the matrix units, which
    have `lanes` x `lanes` multipliers each. `link` is in bytes per second: what a chip sends along
    one axis of its torus, in both directions together.
    """

    clock: float
    lanes: int
    link: float
    host: str  # a topology to compile for one chip, whose first device is used


TPUS = {
    # 4 matrix units; links: jax-ml.github.io/scaling-book, "TPU specs".
    "v5e": TpuCore(1.5e9, 128, 0.9e11, "1x1"),
    # 8 matrix units in two cores, which JAX sees as one device.
    "v5p": TpuCore(1.75e9, 128, 1.8e11, "2x2x1"),
    "v6e": TpuCore(1.75e9, 256, 1.8e11, "1x1"),
}


class GpuSpec(NamedTuple):
    """A GPU as XLA's compiler needs to know it; `fields` are those of its GpuDeviceInfoProto."""

    name: str
    fields: dict[str, int | float]


# NVIDIA's Hopper architecture whitepaper and CUDA's table of technical specifications for compute
# capability 9.0.
_HOPPER: dict[str, int | float] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_block_optin": 232_448,
    "shared_memory_per_core": 233_472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
    "device_address_bits": 64,
}

GPUS = {
    "h100": GpuSpec(
        "NVIDIA H100 80GB HBM3",
        _HOPPER | {"memory_bandwidth": 3_352_320_000_000, "device_memory_size": 84_942_979_072},
    ),
    "h200": GpuSpec(
        "NVIDIA H200",
        _HOPPER | {"memory_bandwidth": 4_800_000_000_000, "device_memory_size": 151_397_597_184},
    ),
}


def start_devices(count: int) -> None:
    """Starts JAX with `count` virtual devices of the CPU.

    Raises `ConfigError` if JAX has already started with other devices.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started, perhaps with these devices
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise ConfigError(
            f"a plan for {count} devices needs as many virtual ones, but JAX has started with "
            f"{jax.device_count()} on {jax.default_backend()}: plan in a new process"
        )
