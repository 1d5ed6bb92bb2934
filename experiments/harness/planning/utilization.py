"""Model FLOPs utilization (MFU): the peak FLOP/s of a run's devices, by their names."""

import math
from typing import NamedTuple

import jax
import numpy as np

from experiments.harness.planning.accelerators import ACCELERATORS
from jaxformer.distributed import Strategy

# `device.device_kind` of JAX -> accelerator.
_KINDS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA L4": "l4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


class Peak(NamedTuple):
    """The peak FLOP/s of `devices` devices of one `kind` in `dtype`.

    `each` is the peak of one device according to its data sheet, None for an unknown kind.
    """

    kind: str
    devices: int
    dtype: str
    each: float | None

    @property
    def total(self) -> float | None:
        """Returns the peak of all devices, None for an unknown kind."""
        return None if self.each is None else self.devices * self.each

    def __str__(self) -> str:
        """Returns the formula of `mfu` in one line."""
        if self.each is None:
            return f"no mfu: the peak FLOP/s of {self.kind} are not known"
        return (
            "mfu = 3 x FLOPs of the forward pass (2 per multiply-add, weights and attention to the "
            "keys that a query may see; without remat, with padding) / seconds / "
            f"({self.devices} x {self.each / 1e12:g} TFLOP/s, {self.kind}, {self.dtype})"
        )


def peak_of(devices: Strategy, dtype: str) -> Peak:
    """Returns the peak of the devices of a run's mesh."""
    kinds = {device.device_kind for device in devices.mesh.devices.flat}
    name = _KINDS.get(next(iter(kinds))) if len(kinds) == 1 else None
    accelerator = None if name is None else ACCELERATORS.get(name)
    each = None if accelerator is None else getattr(accelerator, dtype)
    return Peak(" and ".join(sorted(kinds)), devices.mesh.devices.size, dtype, each)


def rows_and_length(leaf: jax.Array | np.ndarray) -> tuple[int, int]:
    """Returns B and T of a leaf [..., T] of a sharded batch, where B may be several axes."""
    return math.prod(leaf.shape[:-1]), leaf.shape[-1]
