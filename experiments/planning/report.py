"""From a compiled step to sentences: how long it takes, whether it fits, what to change."""

from typing import NamedTuple

from experiments.planning.accelerators import ACCELERATORS, Accelerator, Machine
from experiments.planning.compiling import Compiled


class Prediction(NamedTuple):
    """A step on a machine, in seconds: where arithmetic limits it, and where memory traffic does.

    `mfu`: the share of all devices' peak FLOP/s that the equations' FLOPs make of `seconds`.
    """

    arithmetic: float
    traffic: float
    mfu: float

    @property
    def seconds(self) -> float:
        """The longer of the two: both at once is the best that hardware does."""
        return max(self.arithmetic, self.traffic)


def predict(
    flops: float, traffic: float, machine: Machine, *, devices: int, dtype: str
) -> Prediction:
    """A step of `flops` over all `devices`, each moving `traffic` bytes, in the numbers `dtype`.

    What devices tell each other is not counted.
    """
    accelerator = ACCELERATORS[machine.accelerator]
    peak = devices * (accelerator.bfloat16 if dtype == "bfloat16" else accelerator.float32)
    arithmetic = flops / (peak * machine.utilization)
    moving = traffic / accelerator.bandwidth
    return Prediction(arithmetic, moving, flops / (peak * max(arithmetic, moving)))


def room(accelerator: Accelerator) -> float:
    """Bytes of a device that JAX gives to a program."""
    return accelerator.memory * accelerator.share


def advice(compiled: Compiled, machine: Machine, changes: tuple[str, ...]) -> list[str]:
    """What to change where a step does not fit; empty where it does.

    `changes`: the options, in words, that would make the intermediate results smaller.
    """
    free = room(ACCELERATORS[machine.accelerator])
    if compiled.memory <= free:
        return []
    found = []
    kept = compiled.arguments + compiled.results
    if kept > free / 2:
        parts = 2
        while kept / parts > free / 2:
            parts *= 2
        found.append(
            f"parameters and optimizer take {gigabytes(kept)} a device: keep them in parts, with "
            f"--parallel partition and an fsdp axis {parts} times as long"
        )
    if compiled.temporary > free / 2:
        found += [
            f"intermediate results are {gigabytes(compiled.temporary)}: try {change}"
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
    """The plan of a step of `tokens` tokens, in some twenty lines."""
    free = room(ACCELERATORS[machine.accelerator])
    fits = "fits" if compiled.memory <= free else "DOES NOT FIT"
    counted = compiled.all_flops * devices
    limit = "arithmetic" if prediction.arithmetic >= prediction.traffic else "memory traffic"
    lines = [
        f"parameters          {compiled.parameters:,}",
        f"  their bytes       {gigabytes(compiled.parameter_bytes)}, as many for the gradient, "
        f"{gigabytes(compiled.optimizer_bytes)} for the optimizer",
        f"memory a device     {gigabytes(compiled.memory)} of {gigabytes(free)} that JAX may use "
        f"on {machine.accelerator}: {fits}",
        f"  state and batch   {gigabytes(compiled.arguments)} (of which the state "
        f"{gigabytes(compiled.held)})",
        f"  intermediate      {gigabytes(compiled.temporary)}, and new results "
        f"{gigabytes(compiled.results)}",
        "  largest arrays    (size of one, how often made, where)",
        *(
            f"    {gigabytes(buffer.size):>9}  {buffer.count:>5} x {buffer.shape}  {buffer.origin}"
            for buffer in compiled.buffers
        ),
        f"work a step         {flops:.3e} FLOPs by the equations, {counted:.3e} by XLA's count",
        f"time a step         {prediction.seconds:.3g} s, limited by {limit}",
        f"  arithmetic        {prediction.arithmetic:.3g} s at {machine.utilization:.0%} of peak",
        f"  memory traffic    {prediction.traffic:.3g} s for {gigabytes(compiled.all_traffic)} a "
        "device",
        f"speed               {tokens / prediction.seconds:,.0f} tokens a second, MFU "
        f"{prediction.mfu:.1%}",
        f"planned in          {compiled.seconds:.1f} s, without making machine code",
    ]
    return "\n".join(lines)


ASSUMPTIONS = """\
Memory, arrays and traffic are the plan of XLA's CPU compiler, an estimate: it fuses less than a
GPU's or a TPU's and computes bfloat16 in float32, so that both are rather too high. What devices
tell each other is not counted in the time."""


def gigabytes(size: float) -> str:
    """Bytes in the largest unit of which they make at least one: 1.50 GB is 1.5e9 bytes."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.2f} {unit}"
    return f"{size:.0f} B"
