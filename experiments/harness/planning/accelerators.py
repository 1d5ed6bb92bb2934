"""Accelerators and their data-sheet figures, and virtual devices on the CPU."""

from typing import NamedTuple

import jax

from jaxformer.errors import ConfigError


class Accelerator(NamedTuple):
    """One device according to its data sheet.

    `bfloat16` and `float32` are the peak FLOP/s of matrix products without sparsity, at JAX's
    default precision (TensorFloat-32 on a GPU, bfloat16 on a TPU). `memory` is in bytes,
    `bandwidth` in bytes per second. JAX may use the `share` of the memory.
    """

    bfloat16: float
    float32: float
    memory: float
    bandwidth: float
    share: float


# JAX uses 0.75 of a GPU's memory by default (XLA_PYTHON_CLIENT_MEM_FRACTION; docs.jax.dev, "GPU
# memory allocation") and all of a TPU's.
_GPU, _TPU = 0.75, 1.0

ACCELERATORS = {
    # NVIDIA H100 datasheet, SXM: 1,979 and 989 TFLOPS with sparsity, half without.
    "h100": Accelerator(989.5e12, 494.7e12, 80e9, 3.35e12, _GPU),
    # NVIDIA H200 datasheet, SXM: the arithmetic of an H100.
    "h200": Accelerator(989.5e12, 494.7e12, 141e9, 4.8e12, _GPU),
    # NVIDIA A100 datasheet, SXM 80 GB.
    "a100": Accelerator(312e12, 156e12, 80e9, 2.039e12, _GPU),
    # NVIDIA L4 datasheet: 242 and 120 TFLOPS with sparsity, half without.
    "l4": Accelerator(121e12, 60e12, 24e9, 300e9, _GPU),
    # Google Cloud documentation, "TPU v5e", "TPU v5p" and "TPU v6e": a chip. The memory of v5e and
    # v6e is what libtpu 0.0.52 leaves to programs: 15.75 and 31.24 GiB.
    "v5e": Accelerator(197e12, 197e12, 15.75 * 2**30, 800e9, _TPU),
    "v5p": Accelerator(459e12, 459e12, 95e9, 2_765e9, _TPU),
    "v6e": Accelerator(918e12, 918e12, 31.24 * 2**30, 1_600e9, _TPU),
    # No product: 2 cores at 2.6 GHz, each 2 AVX2 multiply-adds of 8 float32 a cycle (16 x 2 FLOP),
    # one channel of DDR4-3200 (JEDEC: 25.6 GB/s), 16 GB; bfloat16 is computed as float32.
    "cpu": Accelerator(166e9, 166e9, 16e9, 25.6e9, 1.0),
}


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
