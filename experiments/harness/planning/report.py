"""Describes a compiled step: predicted time, whether it fits, what to change."""

from typing import NamedTuple

from experiments.harness.planning.accelerators import ACCELERATORS, Accelerator, Machine
from experiments.harness.planning.compiling import Compiled


class Prediction(NamedTuple):
    """Seconds of a step limited by arithmetic and by memory traffic, and its MFU.

    `mfu` is the FLOPs of the equations / `seconds` / the peak FLOP/s of all devices.
    """

    arithmetic: float
    traffic: float
    mfu: float

    @property
    def seconds(self) -> float:
        """Returns the longer of the two; hardware does both at the same time."""
        return max(self.arithmetic, self.traffic)


def predict(
    flops: float, traffic: float, machine: Machine, *, devices: int, dtype: str
) -> Prediction:
    """Predicts a step of `flops` on all `devices` together, with `traffic` bytes on each.

    Communication between devices is not counted.
    """
    accelerator = ACCELERATORS[machine.accelerator]
    peak = devices * (accelerator.bfloat16 if dtype == "bfloat16" else accelerator.float32)
    arithmetic = flops / (peak * machine.utilization)
    moving = traffic / accelerator.bandwidth
    return Prediction(arithmetic, moving, flops / (peak * max(arithmetic, moving)))


def usable_memory(accelerator: Accelerator) -> float:
    """Returns the bytes of a device that JAX may use."""
    return accelerator.memory * accelerator.share


def advice(compiled: Compiled, machine: Machine, changes: tuple[str, ...]) -> list[str]:
    """Returns what to change if a step does not fit; empty if it fits.

    `changes` are options that reduce the temporary memory.
    """
    free = usable_memory(ACCELERATORS[machine.accelerator])
    if compiled.memory <= free:
        return []
    found = []
    kept = compiled.arguments + compiled.results
    if kept > free / 2:
        parts = 2
        while kept / parts > free / 2:
            parts *= 2
        found.append(
            f"parameters and optimizer take {gigabytes(kept)} per device: shard them, with "
            f"--strategy sharded and an fsdp axis {parts} times as long"
        )
    if compiled.temporary > free / 2:
        found += [
            f"temporary memory is {gigabytes(compiled.temporary)}: try {change}"
            for change in changes
        ]
    return found


def describe(
    compiled: Compiled,
    prediction: Prediction,
    machine: Machine,
    *,
    flops: float,
    tokens: int,
    devices: int,
) -> str:
    """Returns the plan of a step of `tokens` tokens as text."""
    free = usable_memory(ACCELERATORS[machine.accelerator])
    fits = "fits" if compiled.memory <= free else "DOES NOT FIT"
    counted = compiled.all_flops * devices
    limit = "arithmetic" if prediction.arithmetic >= prediction.traffic else "memory traffic"
    lines = [
        f"parameters          {compiled.parameters:,}",
        f"  bytes             {gigabytes(compiled.parameter_bytes)}, the same for the gradient, "
        f"{gigabytes(compiled.optimizer_bytes)} for the optimizer",
        f"memory per device   {gigabytes(compiled.memory)} of {gigabytes(free)} that JAX may use "
        f"on {machine.accelerator}: {fits}",
        f"  state and batch   {gigabytes(compiled.arguments)} (state: {gigabytes(compiled.held)})",
        f"  temporary         {gigabytes(compiled.temporary)}, new results "
        f"{gigabytes(compiled.results)}",
        "  largest arrays    (size of one, number, where)",
        *(
            f"    {gigabytes(buffer.size):>9}  {buffer.count:>5} x {buffer.shape}  {buffer.origin}"
            for buffer in compiled.buffers
        ),
        f"work per step       {flops:.3e} FLOPs by the equations, {counted:.3e} by XLA's count",
        f"time per step       {prediction.seconds:.3g} s, limited by {limit}",
        f"  arithmetic        {prediction.arithmetic:.3g} s at {machine.utilization:.0%} of peak",
        f"  memory traffic    {prediction.traffic:.3g} s for {gigabytes(compiled.all_traffic)} per "
        "device",
        f"speed               {tokens / prediction.seconds:,.0f} tokens per second, MFU "
        f"{prediction.mfu:.1%}",
        f"compiled in         {compiled.seconds:.1f} s, without machine code",
    ]
    return "\n".join(lines)


ASSUMPTIONS = """\
Memory and traffic are an estimate by XLA's CPU compiler. It fuses less than the compilers for GPUs
and TPUs and computes bfloat16 in float32, so both are rather too high. The time does not include
communication between devices."""


def gigabytes(size: float) -> str:
    """Returns bytes in a decimal unit: 1.50 GB is 1.5e9 bytes."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.2f} {unit}"
    return f"{size:.0f} B"
