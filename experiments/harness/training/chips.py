"""Accelerators by their data sheets: peak FLOP/s, memory and bandwidth."""

from typing import NamedTuple

from experiments.harness.cli import GPU_MEMORY_SHARE
from jaxformer.distributed import Strategy


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

    def peak(self, dtype: str) -> float:
        """The peak FLOP/s of matrix products in `dtype`, "bfloat16" or "float32"."""
        return {"bfloat16": self.bfloat16, "float32": self.float32}[dtype]

    @property
    def usable_memory(self) -> float:
        """The bytes that JAX may use."""
        return self.memory * self.share


_GPU = GPU_MEMORY_SHARE
_TPU = 1.0

# TFLOPS of NVIDIA's data sheets are with sparsity where they say so; half of these are without.
ACCELERATORS = {
    # NVIDIA HGX B200: 36 PFLOPS of 8 with sparsity in bfloat16, 18 in TF32; DGX B200: 1,440 GB and
    # 64 TB/s of 8. NVIDIA Blackwell architecture technical brief, GB200: 5 and 2.5 PFLOPS with
    # sparsity; GB200 NVL72: 372 GB and 16 TB/s of 2.
    "b200": Accelerator(2_250e12, 1_125e12, 180e9, 8e12, _GPU),
    "gb200": Accelerator(2_500e12, 1_250e12, 186e9, 8e12, _GPU),
    # NVIDIA HGX B300: the arithmetic of B200 in 16 and 32 bits, 288 GB (2.3 TB of 8), 8 TB/s.
    "b300": Accelerator(2_250e12, 1_125e12, 288e9, 8e12, _GPU),
    # NVIDIA H100 datasheet: SXM 1,979 and 989 TFLOPS with sparsity, 3.35 TB/s; NVL 1,671 and 835,
    # 3.9 TB/s; PCIe in its edition of 2022: 1,513 and 756, 2 TB/s.
    "h100": Accelerator(989.5e12, 494.7e12, 80e9, 3.35e12, _GPU),
    "h100_nvl": Accelerator(835.5e12, 417.5e12, 94e9, 3.9e12, _GPU),
    "h100_pcie": Accelerator(756.5e12, 378e12, 80e9, 2e12, _GPU),
    # NVIDIA H200 datasheet, SXM: the arithmetic of an H100.
    "h200": Accelerator(989.5e12, 494.7e12, 141e9, 4.8e12, _GPU),
    # NVIDIA A100 datasheet: SXM with 80 and 40 GB, PCIe with 80 and 40 GB.
    "a100": Accelerator(312e12, 156e12, 80e9, 2.039e12, _GPU),
    "a100_40gb": Accelerator(312e12, 156e12, 40e9, 1.555e12, _GPU),
    "a100_pcie": Accelerator(312e12, 156e12, 80e9, 1.935e12, _GPU),
    "a100_pcie_40gb": Accelerator(312e12, 156e12, 40e9, 1.555e12, _GPU),
    # NVIDIA L4 datasheet: 242 and 120 TFLOPS with sparsity.
    "l4": Accelerator(121e12, 60e12, 24e9, 300e9, _GPU),
    # NVIDIA RTX Blackwell PRO whitepaper, the Workstation Edition without Max-Q: 1,007.6 and 503.8
    # TFLOPS with sparsity. NVIDIA Ada and Ampere GPU architecture whitepapers, RTX 6000 Ada and
    # RTX A6000: 728.5 and 364.2, 309.7 and 154.8.
    "rtx_pro_6000": Accelerator(503.8e12, 251.9e12, 96e9, 1.792e12, _GPU),
    "rtx_6000_ada": Accelerator(364.2e12, 182.1e12, 48e9, 960e9, _GPU),
    "rtx_a6000": Accelerator(154.8e12, 77.4e12, 48e9, 768e9, _GPU),
    # docs.cloud.google.com/tpu/docs/v5e, v5p and v6e: a chip of 197, 459 and 918 TFLOPS; 819, 2,765
    # and 1,638 GB/s. The memory of v5e and v6e is what libtpu 0.0.52 leaves to programs: 15.75 and
    # 31.24 GiB.
    "v5e": Accelerator(197e12, 197e12, 15.75 * 2**30, 819e9, _TPU),
    "v5p": Accelerator(459e12, 459e12, 95e9, 2_765e9, _TPU),
    "v6e": Accelerator(918e12, 918e12, 31.24 * 2**30, 1_638e9, _TPU),
    # docs.cloud.google.com/tpu/docs/tpu7x: half a chip of 2,307 TFLOPS, 192 GiB and 7,380 GB/s,
    # because JAX sees each of its two cores as a device.
    "tpu7x": Accelerator(1_153.5e12, 1_153.5e12, 96 * 2**30, 3_690e9, _TPU),
    # No product: 2 cores at 2.6 GHz, each 2 AVX2 multiply-adds of 8 float32 a cycle (16 x 2 FLOP),
    # one channel of DDR4-3200 (JEDEC: 25.6 GB/s), 16 GB; bfloat16 is computed as float32.
    "cpu": Accelerator(166e9, 166e9, 16e9, 25.6e9, 1.0),
}


DEVICE_KINDS = {
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 NVL": "h100_nvl",
    "NVIDIA H100 PCIe": "h100_pcie",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100_40gb",
    "NVIDIA A100 80GB PCIe": "a100_pcie",
    "NVIDIA A100-PCIE-40GB": "a100_pcie_40gb",
    "NVIDIA L4": "l4",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx_pro_6000",
    "NVIDIA RTX 6000 Ada Generation": "rtx_6000_ada",
    "NVIDIA RTX A6000": "rtx_a6000",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
"""The accelerator of each `device_kind` of JAX. A CPU has none: its peak differs by machine."""


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
        """The peak of all devices, None for an unknown kind."""
        return None if self.each is None else self.devices * self.each

    def __str__(self) -> str:
        """The formula of `mfu` in one line."""
        if self.each is None:
            return f"no mfu: the peak FLOP/s of {self.kind} are not known"
        return (
            "mfu = 3 x FLOPs of the forward pass (2 per multiply-add, weights and attention to the "
            "keys that a query may see; without remat, with padding) / seconds / "
            f"({self.devices} x {self.each / 1e12:g} TFLOP/s, {self.kind}, {self.dtype})"
        )


def peak_of(devices: Strategy, dtype: str) -> Peak:
    """The peak of the devices of a run's mesh."""
    kinds = {device.device_kind for device in devices.mesh.devices.flat}
    name = DEVICE_KINDS.get(next(iter(kinds))) if len(kinds) == 1 else None
    each = None if name is None else ACCELERATORS[name].peak(dtype)
    return Peak(" and ".join(sorted(kinds)), devices.mesh.devices.size, dtype, each)
