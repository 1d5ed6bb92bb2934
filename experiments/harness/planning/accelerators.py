"""Accelerators and their data-sheet figures, and virtual devices on the CPU."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from experiments.harness.training_config import StrategyName
from jaxformer.config import check_at_least, check_choices
from jaxformer.distributed import parse_mesh
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
    # Google Cloud documentation, "TPU v5e", "TPU v5p" and "TPU v6e": a chip.
    "v5e": Accelerator(197e12, 197e12, 16e9, 800e9, _TPU),
    "v5p": Accelerator(459e12, 459e12, 95e9, 2_765e9, _TPU),
    "v6e": Accelerator(918e12, 918e12, 32e9, 1_600e9, _TPU),
    # No product: 2 cores at 2.6 GHz, each 2 AVX2 multiply-adds of 8 float32 a cycle (16 x 2 FLOP),
    # one channel of DDR4-3200 (JEDEC: 25.6 GB/s), 16 GB; bfloat16 is computed as float32.
    "cpu": Accelerator(166e9, 166e9, 16e9, 25.6e9, 1.0),
}


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is for."""

    accelerator: Literal["h100", "h200", "a100", "l4", "v5e", "v5p", "v6e", "cpu"] = "h100"
    """The kind of device."""
    devices: int = 0
    """Number of devices. 0: as many as the mesh has, or one without a mesh."""
    utilization: float = 0.4
    """Share of the peak FLOP/s that a step reaches where arithmetic limits it."""

    def __post_init__(self):
        check_choices(self)
        check_at_least(self, 0, "devices")
        if not 0.0 < self.utilization <= 1.0:
            raise ConfigError(
                f"utilization={self.utilization}, but a share of peak lies in 0 < share <= 1"
            )

    def count(self, strategy: StrategyName, mesh: str) -> int:
        """Returns the number of devices; raises `ConfigError` for several without --strategy."""
        if strategy == "single" and self.devices > 1:
            raise ConfigError(
                f"devices={self.devices}, but strategy='single' uses one of them: give --strategy "
                "replicated or sharded"
            )
        return self.devices or math.prod(parse_mesh(mesh).values())


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
