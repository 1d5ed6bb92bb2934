"""Describes a step that a target's own compiler has compiled."""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from experiments.harness.planning import counting
from experiments.harness.planning.accelerators import ACCELERATORS, TPUS
from experiments.harness.planning.compiling import CompiledStep
from experiments.harness.planning.report import gigabytes, memory_lines
from experiments.harness.planning.step_time import KERNEL_UTILIZATION, StepTime, step_time
from jaxformer.ops.attention import Selection

_SHOWN = 5
_WIDTH = 80


def describe_compiled(
    step: CompiledStep,
    accelerator: str,
    attention: Sequence[tuple[str, Selection]],
    *,
    flops: float,
    tokens: int,
    devices: int,
    dtype: str,
) -> str:
    """The report of a step of `tokens` tokens and `flops` FLOPs by the equations on all `devices`.

    `attention` holds (name of the function used, what would be selected) of each call.
    """
    program = step.program
    lines = [f"compiled in         {step.seconds:.0f} s; compiled is not run"]
    lines += memory_lines(step.memory, accelerator)
    lines += _work_lines(step, flops, devices)
    lines += _attention_lines(attention)
    lines += _collective_lines(counting.collectives(program))
    if sent := counting.between_slices(program):
        lines.append(f"between slices      {gigabytes(sent)} per device, not in the time below")
    lines += _copy_lines(counting.copies(program))
    lines += _padding_lines(counting.padding(program))
    if accelerator in TPUS:
        time = step_time(program, accelerator, [each.spec for _, each in attention])
        lines += _time_lines(time, accelerator, flops, tokens, devices, dtype)
    else:
        lines += _bound_lines(step, accelerator, flops / devices, dtype)
    if program.unknown_loops:
        lines.append(f"loops of unknown length, counted once: {len(program.unknown_loops)}")
    return "\n".join(map(_cut, lines))


def describe_shortage(error: Exception, accelerator: str) -> str:
    """What a compiler says of a step that does not fit, and the largest arrays if it says them."""
    said = str(error)
    needed = re.search(r"\(([\d.]+[KMGT]?)\) exceeds available HBM \(([\d.]+[KMGT]?)\)", said)
    first = said.partition("\n")[0]
    lines = [
        f"memory per device   {needed[1]} of {needed[2]} on {accelerator}: DOES NOT FIT"
        if needed
        else f"memory per device   DOES NOT FIT on {accelerator}: {first}"
    ]
    sizes = re.findall(r"Size: ([\d.]+[KMGT]?).*?Shape: (\S+?)\{", said, re.DOTALL)
    lines += [f"    {size:>9}  {shape}" for size, shape in sizes[:_SHOWN]]
    return "\n".join(lines)


def _work_lines(step: CompiledStep, flops: float, devices: int) -> list[str]:
    products = counting.products(step.program)
    counted = devices * sum(each.flops * each.times for each in products)
    number = sum(each.times for each in products)
    precise = counting.float32_products(products)
    calls = counting.custom_calls(step.program)
    named = ", ".join(f"{count:,} {name}" for name, count in calls.most_common(3))
    lines = [
        f"work per step       {flops:.3e} FLOPs by the equations",
        f"  matrix products   {counted:.3e} FLOPs, without those of custom calls",
        f"                    {number:,} products per device, of them with a float32 operand: "
        f"{sum(each.times for each in precise):,}",
    ]
    shown: defaultdict[str, int] = defaultdict(int)
    for each in precise:
        shown[f"{each.lhs} x {each.rhs}  {each.origin}"] += each.times
    lines += [f"    {times:>9,}  {name}" for name, times in list(shown.items())[:_SHOWN]]
    moved = gigabytes(counting.traffic(step.program))
    lines.append(f"  memory traffic    {moved} per device, with padding")
    lines.append(f"  kernels           {counting.kernels(step.program):,} per device")
    lines += [f"  custom calls      {named}"] if named else []
    return lines


def _attention_lines(attention: Sequence[tuple[str, Selection]]) -> list[str]:
    lines = []
    for name, selection in attention:
        lines.append(f"attention           {name}, for")
        lines += _wrapped(str(selection.spec), 20)
        if name == selection.name:
            lines += _wrapped(f"because: {selection.reason}", 20)
            continue
        because = selection.reason
        lines += _wrapped(f"auto selects {selection.name}: {because}", 20)
    return lines


def _collective_lines(collectives: Sequence[counting.Collective]) -> list[str]:
    if not collectives:
        return ["collectives         none"]
    groups: defaultdict[tuple, list[counting.Collective]] = defaultdict(list)
    for each in collectives:
        key = each.kind, each.dtype, each.devices, each.asynchronous, each.in_loop
        groups[key].append(each)
    lines = ["collectives         (times per step, bytes per device and step, devices, kind)"]
    for (kind, dtype, devices, asynchronous, in_loop), found in groups.items():
        times = sum(each.times for each in found)
        size = gigabytes(sum(each.bytes * each.times for each in found))
        how = "asynchronous" if asynchronous else "synchronous"
        where = "in a loop" if in_loop else "once"
        lines.append(f"  {times:>7,}  {size:>9}  {devices:>4}  {kind} {dtype}, {how}, {where}")
    return lines


def _copy_lines(copies: Sequence[counting.Copy]) -> list[str]:
    number, size = sum(each.times for each in copies), sum(x.bytes * x.times for x in copies)
    lines = [f"layout copies       {number:,} per step, {gigabytes(size)} per device"]
    alike = Counter[tuple[str, str, int]]()
    for each in copies:
        alike[str(each.shape), each.origin, each.bytes] += each.times
    largest = sorted(alike.items(), key=lambda item: -item[0][2] * item[1])[:_SHOWN]
    return lines + [
        f"    {gigabytes(size):>9}  {times:>5} x {shape}  {where}"
        for (shape, where, size), times in largest
    ]


def _padding_lines(padding: Iterable[tuple]) -> list[str]:
    worst = list(padding)[:_SHOWN]
    lines = ["padding of tiles    (of one array: added, in place of)"] if worst else []
    return lines + [
        f"    {gigabytes(waste):>9}  {gigabytes(shape.bytes):>9}  {shape}" for shape, waste in worst
    ]


def _time_lines(
    time: StepTime, accelerator: str, flops: float, tokens: int, devices: int, dtype: str
) -> list[str]:
    peak = devices * getattr(ACCELERATORS[accelerator], dtype)
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


def _bound_lines(step: CompiledStep, accelerator: str, flops: float, dtype: str) -> list[str]:
    figures = ACCELERATORS[accelerator]
    arithmetic = flops / getattr(figures, dtype)
    moving = counting.traffic(step.program) / figures.bandwidth
    return [
        f"time per step       at least {max(arithmetic, moving):.3g} s; GPUs have no cycles here",
        f"  arithmetic        {arithmetic:.3g} s at the peak",
        f"  memory traffic    {moving:.3g} s at the data sheet's rate",
    ]


def _cut(line: str) -> str:
    """A line of at most 80 columns; a longer one ends with three dots."""
    return line.rstrip() if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(text, _WIDTH, initial_indent=space, subsequent_indent=space)
