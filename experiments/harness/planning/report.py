"""Describes a compiled training step: memory, work, attention, collectives and time."""

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from experiments.harness.planning.compiling import TPU_SHARE, AttentionCall, CompiledStep
from experiments.harness.planning.counting import (
    Collective,
    between_slices,
    collectives,
    largest_arrays,
    work,
)
from experiments.harness.planning.hlo import Program
from experiments.harness.planning.step_time import step_time
from experiments.harness.planning.targets import TPUS
from experiments.harness.training.utilization import ACCELERATORS
from jaxformer.nn.blocks import REMAT

ASSUMPTIONS = f"""\
The temporary memory of a step is {TPU_SHARE} of what XLA's CPU compiler needs, because a
TPU needs less. In ten steps that libtpu compiled for v5e chips, the memory above
was 0.7 to 1.25 times libtpu's in nine, and five times in a small one. The memory
of the other programs is an upper bound. --compiler tpu and --compiler cuda ask
the target's own compiler."""
ASSUMED_MFU = 0.4
"""The MFU at which the time of a step is shown where no compiler says cycles: an assumption."""

_LOSS_CHUNK = 1_024  # tokens; matrix products of this size keep a GPU busy
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
    """Report of one step, and of the other programs of the run: memory, work and time per device.

    A step of all `devices` has `tokens` and, by the model's equations, `flops`.
    `estimate`: the CPU's compiler compiled it, so its memory is about the target's, and its program
    is not.
    """
    peak = devices * getattr(ACCELERATORS[accelerator], dtype)
    lines = [f"compiled in         {step.seconds:.0f} s; compiled is not run"]
    if step.shortage:
        lines.append(describe_shortage(step.shortage, accelerator))
        return "\n".join(lines + _other_lines(step, accelerator, estimate))
    lines += _memory_lines(step, accelerator, "MAY NOT FIT" if estimate else "DOES NOT FIT")
    lines.append(f"work per step       {flops:.3e} FLOPs by the equations")
    if not estimate:
        done = work(step.program)
        lines.append(
            f"  of the program    {devices * done.flops:.3e} FLOPs of products on all devices, "
            "without"
        )
        lines.append(
            f"                    attention kernels; {gigabytes(done.bytes)} moved per device"
        )
        lines += attention_lines(step.attention)
        lines += _collective_lines(step.program)
    if estimate or accelerator not in TPUS:
        seconds = flops / peak
        lines += [
            f"time per step       at least {seconds:.3g} s, the FLOPs at the peak",
            f"speed               {ASSUMED_MFU * tokens / seconds:,.0f} tokens per second at an "
            f"assumed MFU of {ASSUMED_MFU:.0%}",
        ]
    else:
        lines += _time_lines(step, accelerator, flops, tokens, peak)
    lines += _other_lines(step, accelerator, estimate)
    if step.program.unknown_loops:
        lines.append(f"loops of unknown length, counted once: {len(step.program.unknown_loops)}")
    return "\n".join(lines)


def _other_lines(step: CompiledStep, accelerator: str, estimate: bool) -> list[str]:
    """The memory of the other programs of the run, and what computes their attention."""
    free, lines = (
        ACCELERATORS[accelerator].usable_memory,
        ["other programs      (memory per device)"],
    )
    for program in step.others:
        fits = "" if program.memory <= free else ": MAY NOT FIT" if estimate else ": DOES NOT FIT"
        names = sorted({call.name for call in program.attention})
        by = f", attention by {' and '.join(names)}" if names and not estimate else ""
        lines.append(f"  {gigabytes(program.memory):>9}  {program.name}{by}{fits}")
        if program.program and not estimate:
            lines += [f"  {line}" for line in _collective_rows(program.program)]
    return lines


def describe_shortage(text: str, accelerator: str) -> str:
    """Reason why the step does not fit, with its largest arrays."""
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


def advice(config: Any, step: CompiledStep, accelerator: str) -> list[str]:
    """The changes to `config` that make each program fit that does not; empty if all do."""
    free, memory, training = ACCELERATORS[accelerator].usable_memory, step.memory, config.training
    shards = step.num_shards
    parts = f"--training.grad_accumulation {2 * shards * -(-training.grad_accumulation // shards)}"
    chunk = [] if training.loss_chunk else [f"--training.loss_chunk {_LOSS_CHUNK}"]
    longer = "--strategy sharded and an fsdp axis {} times as long"
    sentences = []
    kept = memory.arguments + memory.results
    if memory.total > free and kept > free / 2:
        times = 2 ** math.ceil(math.log2(kept / (free / 2)))
        sentences.append(
            f"parameters and optimizer take {gigabytes(kept)} per device: shard them, with "
            f"{longer.format(times)}"
        )
    if memory.total > free and memory.temporary > free / 2:
        remats = list(REMAT)
        keeping_less = remats[remats.index(training.remat) + 1 :]
        options = [parts, *chunk, *(f"--training.remat {name}" for name in keeping_less)]
        options += [] if config.model.dtype == "bfloat16" else ["--model.dtype bfloat16"]
        temporary = gigabytes(memory.temporary)
        sentences += [
            f"temporary memory of the step is {temporary}: try {option}" for option in options
        ]
    for program in step.others:
        if program.memory > free:
            tried = {
                "validation": lambda: [parts, *chunk],
                "sampling": lambda: [
                    f"--sampling.max_new_tokens {config.sampling.max_new_tokens // 2}"
                ],
                "beam": lambda: [f"--translation.batch_size {config.translation.batch_size // 2}"],
                "averaging": lambda: [],
            }[program.name.split()[0]]()
            either = " or ".join([*tried, longer.format(2)])
            sentences.append(f"{program.name} needs {gigabytes(program.memory)}: try {either}")
    return sentences


def gigabytes(size: float) -> str:
    """Formats bytes in decimal units: 1.5e9 -> "1.50 GB"."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.2f} {unit}"
    return f"{size:.0f} B"


def _memory_lines(step: CompiledStep, accelerator: str, too_large: str) -> list[str]:
    memory, free = step.memory, ACCELERATORS[accelerator].usable_memory
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
        "  largest arrays    (size of one, number)",
        *(
            f"    {gigabytes(size):>9}  {count:>5} x {shape}"
            for size, shape, count in largest_arrays(step.program)
        ),
    ]


def attention_lines(attention: Sequence[AttentionCall]) -> list[str]:
    """The function that computes each call of `attention`, and why."""
    lines = []
    for name, spec, explanation in attention:
        lines.append(f"attention           {name}, for")
        lines += _wrapped(str(spec))
        chosen, *reasons = explanation.splitlines()
        chosen = chosen.rpartition(" ")[2]
        if name != chosen:
            lines += _wrapped(f"auto takes {chosen}")
        for reason in reasons:
            lines += _wrapped(reason.strip())
    return lines


def _collective_lines(program: Program) -> list[str]:
    rows = _collective_rows(program)
    if not rows:
        return ["collectives         none"]
    lines = [
        "collectives         (times per step, bytes per device and step, devices, kind)",
        *rows,
    ]
    if sent := between_slices(program):
        lines.append(f"between slices      {gigabytes(sent)} per device")
    return lines


def _collective_rows(program: Program) -> list[str]:
    """A row for each kind of collective: times, bytes, devices, kind."""
    groups: defaultdict[tuple, list[Collective]] = defaultdict(list)
    for each in collectives(program):
        key = each.kind, each.dtype, each.devices, each.asynchronous, each.in_loop
        groups[key].append(each)
    rows = []
    for (kind, dtype, devices, asynchronous, in_loop), alike in groups.items():
        times = sum(each.times for each in alike)
        size = gigabytes(sum(each.bytes * each.times for each in alike))
        how = "asynchronous" if asynchronous else "synchronous"
        where = "in a loop" if in_loop else "once"
        rows.append(f"  {times:>7,}  {size:>9}  {devices:>4}  {kind} {dtype}, {how}, {where}")
    return rows


def _time_lines(
    step: CompiledStep, accelerator: str, flops: float, tokens: int, peak: float
) -> list[str]:
    """Time and speed on a TPU; `peak` is in FLOP/s of all devices."""
    specs = [call.spec for call in step.attention]
    time = step_time(step.program, accelerator, specs)
    clock = TPUS[accelerator].clock / 1e9
    return [
        f"time per step       {time.total:.3g} s: a prediction, never measured",
        f"  kernels           {time.kernels:.3g} s, the compiler's cycles at {clock:g} GHz",
        f"  flash attention   at least {time.attention:.3g} s, its FLOPs at the peak",
        f"  sorts             {time.sorts:.3g} s, modelled",
        f"  collectives       {time.collectives:.3g} s, modelled by link rate",
        f"  asynchronous ones {time.asynchronous:.3g} s, which hide behind the kernels",
        f"  between slices    {time.between_slices:.3g} s, modelled by the network's rate",
        f"speed               at most {tokens / time.total:,.0f} tokens per second, MFU "
        f"{flops / time.total / peak:.1%}",
    ]


def _wrapped(text: str) -> list[str]:
    space = " " * 20
    return textwrap.wrap(text, _WIDTH, initial_indent=space, subsequent_indent=space)
