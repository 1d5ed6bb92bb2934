"""The share of its peak at which a machine computes (MFU), from its own name."""

import math
from typing import NamedTuple

import jax

from experiments.planning.accelerators import ACCELERATORS
from jaxformer.parallel import Devices

# As JAX names them (`device.device_kind`). Other products of the same name have another peak.
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
    """What `devices` devices of one `kind` can do together in the numbers `dtype`.

    `each`: matrix products' FLOP/s of one by its maker, None where the kind is not known: no share
    of it is ever guessed.
    """

    kind: str
    devices: int
    dtype: str
    each: float | None

    @property
    def total(self) -> float | None:
        """FLOP/s of all devices."""
        return None if self.each is None else self.devices * self.each

    def __str__(self) -> str:
        """What `mfu` in the log is, in one line."""
        if self.each is None:
            return f"no mfu: the peak FLOP/s of {self.kind} are not known"
        return (
            "mfu = 3 x FLOPs of the forward pass (2 a multiply-add: weights, and attention to the "
            "keys a query may see; no look-ups, no remat; padding counts) / seconds / "
            f"({self.devices} x {self.each / 1e12:g} TFLOP/s, {self.kind}, {self.dtype})"
        )


def peak_of(devices: Devices, dtype: str) -> Peak:
    """The peak of the devices that make a run's steps."""
    kinds = {device.device_kind for device in devices.mesh.devices.flat}
    name = _KINDS.get(next(iter(kinds))) if len(kinds) == 1 else None
    accelerator = ACCELERATORS.get(name)
    each = None if accelerator is None else getattr(accelerator, dtype)
    return Peak(" and ".join(sorted(kinds)), devices.mesh.devices.size, dtype, each)


def rows_and_length(leaf: jax.Array) -> tuple[int, int]:
    """B and T of a leaf [..., T] of a placed batch, whatever axes its rows are divided in."""
    return math.prod(leaf.shape[:-1]), leaf.shape[-1]
