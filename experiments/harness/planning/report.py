"""Describes a step that the CPU's compiler has compiled: a quick estimate for any accelerator."""

from typing import NamedTuple

from experiments.harness.planning import counting
from experiments.harness.planning.accelerators import ACCELERATORS, Accelerator
from experiments.harness.planning.compiling import CompiledStep, StepMemory


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
    flops: float,
    traffic: float,
    accelerator: Accelerator,
    *,
    utilization: float,
    devices: int,
    dtype: str,
) -> Prediction:
    """Predicts a step of `flops` on all `devices` together, with `traffic` bytes on each.

    Arithmetic reaches `utilization`, a share of the peak. Communication between devices is not
    counted.
    """
    peak = devices * (accelerator.bfloat16 if dtype == "bfloat16" else accelerator.float32)
    arithmetic = flops / (peak * utilization)
    moving = traffic / accelerator.bandwidth
    return Prediction(arithmetic, moving, flops / (peak * max(arithmetic, moving)))


def usable_memory(accelerator: Accelerator) -> float:
    """Returns the bytes of a device that JAX may use."""
    return accelerator.memory * accelerator.share


def advice(memory: StepMemory, accelerator: str, changes: tuple[str, ...]) -> list[str]:
    """Returns what to change if a step does not fit; empty if it fits.

    `changes` are options that reduce the temporary memory.
    """
    free = usable_memory(ACCELERATORS[accelerator])
    if memory.total <= free:
        return []
    found = []
    kept = memory.arguments + memory.results
    if kept > free / 2:
        parts = 2
        while kept / parts > free / 2:
            parts *= 2
        found.append(
            f"parameters and optimizer take {gigabytes(kept)} per device: shard them, with "
            f"--strategy sharded and an fsdp axis {parts} times as long"
        )
    if memory.temporary > free / 2:
        found += [
            f"temporary memory is {gigabytes(memory.temporary)}: try {change}" for change in changes
        ]
    return found


def describe(
    step: CompiledStep,
    prediction: Prediction,
    accelerator: str,
    *,
    utilization: float,
    flops: float,
    tokens: int,
    devices: int,
) -> str:
    """Returns the plan of a step of `tokens` tokens as text."""
    limit = "arithmetic" if prediction.arithmetic >= prediction.traffic else "memory traffic"
    moved = gigabytes(counting.traffic(step.program))
    lines = [
        *memory_lines(step.memory, accelerator, "MAY NOT FIT"),
        f"work per step       {flops:.3e} FLOPs by the equations",
        f"time per step       {prediction.seconds:.3g} s, limited by {limit}",
        f"  arithmetic        {prediction.arithmetic:.3g} s at {utilization:.0%} of peak",
        f"  memory traffic    {prediction.traffic:.3g} s for {moved} per device",
        f"speed               {tokens / prediction.seconds:,.0f} tokens per second, MFU "
        f"{prediction.mfu:.1%}",
        f"compiled in         {step.seconds:.1f} s, without machine code",
    ]
    return "\n".join(lines)


def memory_lines(
    memory: StepMemory, accelerator: str, too_large: str = "DOES NOT FIT"
) -> list[str]:
    """The lines about parameters and memory; `too_large` says what more than there is means."""
    free = usable_memory(ACCELERATORS[accelerator])
    fits = "fits" if memory.total <= free else too_large
    return [
        f"parameters          {memory.parameters:,}",
        f"  bytes             {gigabytes(memory.parameter_bytes)}, the optimizer's "
        f"{gigabytes(memory.optimizer_bytes)}",
        f"memory per device   {gigabytes(memory.total)} of {gigabytes(free)} that JAX may use "
        f"on {accelerator}: {fits}",
        f"  state and batch   {gigabytes(memory.arguments)} (state: {gigabytes(memory.held)})",
        f"  temporary         {gigabytes(memory.temporary)}, new results "
        f"{gigabytes(memory.results)}",
        "  largest arrays    (size of one, number, where)",
        *(
            f"    {gigabytes(buffer.size):>9}  {buffer.count:>5} x {buffer.shape}  {buffer.origin}"
            for buffer in memory.buffers
        ),
    ]


ASSUMPTIONS = """\
Memory and traffic are upper bounds by XLA's CPU compiler, which fuses less than the compilers for
GPUs and TPUs and computes bfloat16 in float32. Of 10 programs that libtpu compiled for v5e chips, 9
need 38 to 47 % of this memory; one small enough for the memory on the chip needs 10 %. The time
does not include communication. --compiler tpu and --compiler cuda ask the target's own compiler."""


def gigabytes(size: float) -> str:
    """Returns bytes in a decimal unit: 1.50 GB is 1.5e9 bytes."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.2f} {unit}"
    return f"{size:.0f} B"
