"""Machines by name, and as many virtual devices as one of them has."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax

from experiments.settings import Parallel
from jaxformer.config import ConfigError, check_least
from jaxformer.parallel import parse_mesh


class Accelerator(NamedTuple):
    """One device as its maker describes it.

    `bfloat16`, `float32`: peak FLOP/s of matrix products of these inputs, without sparsity, at
    JAX's default precision (float32 goes through TensorFloat-32 on a GPU, bfloat16 on a TPU).
    `memory` in bytes, `bandwidth` in bytes a second; `share` of the memory is JAX's to use.
    """

    bfloat16: float
    float32: float
    memory: float
    bandwidth: float
    share: float


# JAX takes three quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise
# (docs.jax.dev, "GPU memory allocation"); a TPU's it takes whole.
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
    """The machine that a plan is for.

    `accelerator`: h100, h200, a100, l4, v5e, v5p, v6e or cpu. `devices`: how many of them; 0 is
    as many as the mesh has places, and one without a mesh. `utilization`: the share of peak
    FLOP/s that a step is taken to reach where arithmetic limits it.
    """

    accelerator: str = "h100"
    devices: int = 0
    utilization: float = 0.4

    def __post_init__(self):
        if self.accelerator not in ACCELERATORS:
            known = ", ".join(ACCELERATORS)
            raise ConfigError(f"accelerator={self.accelerator!r} is unknown: give one of {known}")
        check_least(self, 0, "devices")
        if not 0.0 < self.utilization <= 1.0:
            raise ConfigError(
                f"utilization={self.utilization}, but a share of peak lies in 0 < share <= 1"
            )

    def count(self, parallel: Parallel, mesh: str) -> int:
        """How many devices there are. Raises `ConfigError` for several of which one is used."""
        if parallel == "one" and self.devices > 1:
            raise ConfigError(
                f"devices={self.devices}, but parallel='one' uses one of them: give --parallel "
                "replicate or partition"
            )
        return self.devices or math.prod(parse_mesh(mesh).values())


def start_devices(count: int) -> None:
    """Lets JAX see `count` virtual devices of this processor and nothing else.

    Raises `ConfigError` where JAX has already started with another number of them.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # started already, perhaps with what is needed
    if jax.device_count() != count or jax.default_backend() != "cpu":
        raise ConfigError(
            f"a plan for {count} devices needs as many virtual ones, but JAX has started with "
            f"{jax.device_count()} on {jax.default_backend()}: plan in a process of its own"
        )
