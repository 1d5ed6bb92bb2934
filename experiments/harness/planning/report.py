"""Describes a compiled training step: memory, work, attention, collectives, copies and time."""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Sequence

from experiments.harness.planning import counting
from experiments.harness.planning.compiling import CompiledStep, StepMemory
from experiments.harness.planning.step_time import KERNEL_UTILIZATION, step_time
from experiments.harness.planning.targets import TPUS
from experiments.harness.training.utilization import ACCELERATORS
from jaxformer.ops.attention import Selection

ASSUMPTIONS = """\
The memory is an upper bound by XLA's CPU compiler, which fuses less than the compilers for GPUs and
TPUs and computes bfloat16 in float32. Of 10 programs that libtpu compiled for v5e chips, 9 need 38
to 47 % of it; one small enough for the memory on the chip needs 10 %. --compiler tpu and --compiler
cuda ask the target's own compiler."""
ASSUMED_MFU = 0.4
"""The MFU at which the time of a step is shown where no compiler says cycles: an assumption."""

_SHOWN = 5
_WIDTH = 80


def describe(
    step: CompiledStep,
    accelerator: str,
    *,
    flops: float,
    tokens: int,
    devices: int,
    dtype: str,
    estimate: bool = False,
) -> str:
    """Returns the report of a step of `tokens` tokens and `flops` FLOPs on all `devices`.

    `estimate`: the step was compiled by the CPU's compiler, so its memory is an upper bound and
    its program is not the target's.
    """
    lines = [f"compiled in         {step.seconds:.0f} s; compiled is not run"]
    lines += _memory_lines(step.memory, accelerator, "MAY NOT FIT" if estimate else "DOES NOT FIT")
    lines.append(f"work per step       {flops:.3e} FLOPs by the equations")
    if not estimate:
        lines += _program_lines(step)
    peak = devices * getattr(ACCELERATORS[accelerator], dtype)
    if estimate or accelerator not in TPUS:
        seconds = flops / peak
        lines += [
            f"time per step       at least {seconds:.3g} s, the FLOPs at the peak",
            f"speed               {ASSUMED_MFU * tokens / seconds:,.0f} tokens per second at an "
            f"assumed MFU of {ASSUMED_MFU:.0%}",
        ]
    else:
        lines += _time_lines(step, accelerator, flops, tokens, peak)
    if step.program.unknown_loops:
        lines.append(f"loops of unknown length, counted once: {len(step.program.unknown_loops)}")
    return "\n".join(map(_cut, lines))


def describe_shortage(error: Exception, accelerator: str) -> str:
    """Returns the compiler's reason that a step does not fit, and the largest arrays it names."""
    text = str(error)
    needed = re.search(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", text)
    first = text.partition("\n")[0]
    lines = [
        f"memory per device   {needed[1]} of {needed[2]} on {accelerator}: DOES NOT FIT"
        if needed
        else f"memory per device   DOES NOT FIT on {accelerator}: {first}"
    ]
    sizes = re.findall(r"Size: ([\d.]+[KMGT]?).*?Shape: (\S+?)\{", text, re.DOTALL)
    lines += [f"    {size:>9}  {shape}" for size, shape in sizes[:_SHOWN]]
    return "\n".join(lines)


def advice(memory: StepMemory, accelerator: str, options: Sequence[str]) -> list[str]:
    """Returns what to change if a step does not fit; empty if it fits.

    `options` reduce the temporary memory.
    """
    free = ACCELERATORS[accelerator].usable_memory
    if memory.total <= free:
        return []
    sentences = []
    kept = memory.arguments + memory.results
    if kept > free / 2:
        parts = 2
        while kept / parts > free / 2:
            parts *= 2
        sentences.append(
            f"parameters and optimizer take {gigabytes(kept)} per device: shard them, with "
            f"--strategy sharded and an fsdp axis {parts} times as long"
        )
    if memory.temporary > free / 2:
        sentences += [
            f"temporary memory is {gigabytes(memory.temporary)}: try {option}" for option in options
        ]
    return sentences


def gigabytes(size: float) -> str:
    """Returns bytes in a decimal unit: 1.50 GB is 1.5e9 bytes."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.2f} {unit}"
    return f"{size:.0f} B"


def _memory_lines(memory: StepMemory, accelerator: str, too_large: str) -> list[str]:
    free = ACCELERATORS[accelerator].usable_memory
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


def _program_lines(step: CompiledStep) -> list[str]:
    """The lines about the program of the target's own compiler."""
    program = step.program
    precise = counting.float32_products(program)
    number = sum(each.times for each in precise)
    calls = counting.custom_calls(program).most_common(3)
    lines = [f"  float32 products  {number:,} per device"] if precise else []
    by_text = Counter[str]()
    for each in precise:
        by_text[f"{each.text}  {each.origin}"] += each.times
    lines += [f"    {times:>9,}  {text}" for text, times in by_text.most_common(_SHOWN)]
    if calls:
        lines.append("  custom calls      " + ", ".join(f"{n:,} {name}" for name, n in calls))
    lines += _attention_lines(step.attention)
    lines += _collective_lines(counting.collectives(program))
    if sent := counting.between_slices(program):
        lines.append(f"between slices      {gigabytes(sent)} per device, not in the time below")
    return lines + _copy_lines(counting.copies(program))


def _attention_lines(attention: Sequence[tuple[str, Selection]]) -> list[str]:
    lines = []
    for name, selection in attention:
        lines.append(f"attention           {name}, for")
        lines += _wrapped(str(selection.spec))
        selected = "" if name == selection.name else f"auto selects {selection.name}, "
        lines += _wrapped(f"{selected}because: {selection.reason}")
    return lines


def _collective_lines(collectives: Sequence[counting.Collective]) -> list[str]:
    if not collectives:
        return ["collectives         none"]
    groups: defaultdict[tuple, list[counting.Collective]] = defaultdict(list)
    for each in collectives:
        key = each.kind, each.dtype, each.devices, each.asynchronous, each.in_loop
        groups[key].append(each)
    lines = ["collectives         (times per step, bytes per device and step, devices, kind)"]
    for (kind, dtype, devices, asynchronous, in_loop), alike in groups.items():
        times = sum(each.times for each in alike)
        size = gigabytes(sum(each.bytes * each.times for each in alike))
        how = "asynchronous" if asynchronous else "synchronous"
        where = "in a loop" if in_loop else "once"
        lines.append(f"  {times:>7,}  {size:>9}  {devices:>4}  {kind} {dtype}, {how}, {where}")
    return lines


def _copy_lines(copies: Sequence[counting.Operation]) -> list[str]:
    number, size = sum(each.times for each in copies), sum(x.bytes * x.times for x in copies)
    lines = [f"layout copies       {number:,} per step, {gigabytes(size)} per device"]
    alike = Counter[tuple[str, str, int]]()
    for each in copies:
        alike[each.text, each.origin, each.bytes] += each.times
    largest = sorted(alike.items(), key=lambda item: -item[0][2] * item[1])[:_SHOWN]
    return lines + [
        f"    {gigabytes(size):>9}  {times:>5} x {shape}  {where}"
        for (shape, where, size), times in largest
    ]


def _time_lines(
    step: CompiledStep, accelerator: str, flops: float, tokens: int, peak: float
) -> list[str]:
    """Time and speed on a TPU; `peak` is in FLOP/s of all devices."""
    time = step_time(step.program, accelerator, step.attention_specs)
    clock = TPUS[accelerator].clock / 1e9
    return [
        f"time per step       {time.total:.3g} s: a prediction, never measured",
        f"  kernels           {time.kernels:.3g} s, the compiler's cycles at {clock:g} GHz",
        f"  flash attention   {time.attention:.3g} s, modelled: {KERNEL_UTILIZATION:.0%} of peak",
        f"  sorts             {time.sorts:.3g} s, modelled",
        f"  collectives       {time.collectives:.3g} s, modelled by link rate",
        f"  asynchronous ones {time.asynchronous:.3g} s, which hide behind the kernels",
        f"speed               {tokens / time.total:,.0f} tokens per second, MFU "
        f"{flops / time.total / peak:.1%}",
    ]


def _cut(line: str) -> str:
    """A line of at most 80 columns; a longer one ends with three dots."""
    return line.rstrip() if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _wrapped(text: str) -> list[str]:
    space = " " * 20
    return textwrap.wrap(text, _WIDTH, initial_indent=space, subsequent_indent=space)
