"""Describes the compiled programs of a run: memory, attention, collectives, work and time."""

import contextlib
import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import jax

from experiments.harness.planning.collectives import between_slices, collectives
from experiments.harness.planning.compiling import (
    TPU_SHARE,
    PlannedProgram,
    PlannedTraining,
    plan_run,
)
from experiments.harness.planning.largest_arrays import largest_arrays
from experiments.harness.planning.step_time import step_time
from experiments.harness.planning.targets import TPUS, Compiler
from experiments.harness.planning.work import work
from experiments.harness.training.chips import ACCELERATORS
from experiments.harness.training.task import Cost
from jaxformer.nn.remat import REMAT

ASSUMPTIONS = f"""\
The temporary memory of a step is {TPU_SHARE} of what XLA's CPU compiler needs, because a
TPU needs less. In ten steps that libtpu compiled for v5e chips, the memory above
was 0.7 to 1.25 times libtpu's in nine, and five times in a small one. The memory
of the other programs is an upper bound. --compiler tpu and --compiler cuda ask
the target's own compiler."""
ASSUMED_MFU = 0.4
"""The MFU at which the time of a step is shown where no compiler says cycles: an assumption."""

_LOSS_CHUNK = 1_024  # tokens; matrix products of this size keep a GPU busy


def report(
    config: Any,
    training: PlannedTraining,
    accelerator: str,
    count: int,
    compiler: Compiler,
    devices: Any = None,
) -> Iterator[str]:
    """Paragraphs on a run on `count` devices, each when its program is compiled.

    They say what to change for the memory of each program. Without `devices` for the `compiler`
    the CPU's estimates.
    """
    cost = training.cost(config)
    is_estimate = devices is None
    yield (
        f"{config.name}: a step of {cost.positions:,} tokens on {count} x {accelerator}, "
        f"{config.mesh or config.strategy}; bytes per device"
    )
    yield f"compiler            {_version(compiler)}; compiled is not run"
    run = plan_run(config, training, devices)
    weights = run.state.params
    optimizer = (run.state.opt_state, run.state.ema)
    number = sum(leaf.size for leaf in jax.tree.leaves(weights))
    yield (
        f"parameters          {number:,}; {gigabytes(_bytes_of(weights))}, the optimizer's "
        f"{gigabytes(_bytes_of(optimizer))}"
    )
    changes = []
    for program in run.programs:
        yield describe(program, accelerator, is_estimate)
        if program.name == "step" and not program.shortage:
            yield describe_step(program, accelerator, cost, count, config.model.dtype, is_estimate)
        changes += advice(config, program, accelerator, run.num_shards)
    yield from (f"change: {sentence}" for sentence in changes)
    if is_estimate:
        yield ASSUMPTIONS


def _bytes_of(tree: Any) -> int:
    """The bytes of `tree` on all devices together."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _version(compiler: Compiler) -> str:
    """The versions of the packages that hold a compiler."""
    packages = {"cpu": ["jaxlib"], "tpu": ["libtpu"]}
    cuda = ["jax-cuda13-plugin", "jax-cuda12-plugin"]
    versions = []
    for name in packages.get(compiler, cuda):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return ", ".join([*versions, f"JAX {jax.__version__}"])


def describe(program: PlannedProgram, accelerator: str, estimate: bool = False) -> str:
    """Report of one program: memory per device, attention and collectives.

    `estimate`: the CPU's compiler compiled it, so its memory is about the target's, and its
    instructions are not.
    """
    free = ACCELERATORS[accelerator].usable_memory
    if program.memory <= free:
        fits = "fits"
    elif estimate:
        fits = "MAY NOT FIT"
    else:
        fits = "DOES NOT FIT"
    lines = [
        f"{program.name:<19} {gigabytes(program.memory)} of {gigabytes(free)} that JAX may use on "
        f"{accelerator}: {fits}"
    ]
    if program.shortage:
        return "\n".join([*lines, *_rows("  refused", [program.shortage])])
    if not program.program.executed:
        return lines[0]
    sizes = (
        f"state and batch {gigabytes(program.arguments)}, temporary "
        f"{gigabytes(program.temporary)}, new results {gigabytes(program.results)}"
    )
    arrays = largest_arrays(program.program)
    largest = [f"{gigabytes(size):>9}  {count:>5} x {shape}" for size, shape, count in arrays]
    lines += _rows("  of these", [sizes]) + _rows("  largest arrays", largest)
    if not estimate:
        calls = []
        for name, spec, explanation in program.attention:
            chosen, *reasons = explanation.splitlines()
            calls += [f"{name}, for {spec}", *(reason.strip() for reason in reasons)]
            if not chosen.endswith(f": {name}"):
                calls.append(f"auto takes {chosen.split()[-1]}")
        sent = list(_collective_rows(program))
        lines += _rows("  attention", calls) + _rows("  collectives", sent or ["none"])
    if unknown := len(program.program.unknown_loops):
        lines.append(f"  loops of unknown length, counted once: {unknown}")
    return "\n".join(lines)


def describe_step(
    step: PlannedProgram,
    accelerator: str,
    cost: Cost,
    devices: int,
    dtype: str,
    estimate: bool = False,
) -> str:
    """Report of the work and the time of a step that has `cost` on all `devices`."""
    peak = devices * ACCELERATORS[accelerator].peak(dtype)
    lines = [f"work per step       {cost.flops:.3e} FLOPs by the equations"]
    if not estimate:
        done = work(step.program)
        lines += _rows(
            "  of the program",
            [
                f"{devices * done.flops:.3e} FLOPs of products on all devices, without kernels "
                f"of attention and experts; {gigabytes(done.bytes)} read and written by the "
                "kernels of a device, in memory or on the chip"
            ],
        )
    if estimate or accelerator not in TPUS:
        lines += _assumed_time(cost, peak)
    else:
        lines += _predicted_time(step, accelerator, cost, peak)
    return "\n".join(lines)


def _assumed_time(cost: Cost, peak: float) -> list[str]:
    """The least time of a step at the `peak` of all devices, and its speed at an assumed MFU."""
    seconds = cost.flops / peak
    speed = ASSUMED_MFU * cost.positions / seconds
    return [
        f"time per step       at least {seconds:.3g} s, the FLOPs at the peak",
        f"speed               {speed:,.0f} tokens per second at an assumed MFU of "
        f"{ASSUMED_MFU:.0%}",
    ]


def _predicted_time(step: PlannedProgram, accelerator: str, cost: Cost, peak: float) -> list[str]:
    """The time of a step on a TPU by its compiler's cycles, its parts, and the speed."""
    specs = [call.spec for call in step.attention]
    time = step_time(step.program, accelerator, specs, step.schedules)
    clock = TPUS[accelerator].clock / 1e9
    parts = {
        "kernels": (time.kernels, f"the compiler's cycles at {clock:g} GHz"),
        "flash attention": (time.attention, "the schedules of its kernels"),
        "attention kernels": (time.attention_bound, "at least: their FLOPs at the peak"),
        "experts": (time.experts, "the FLOPs of all choices at the peak"),
        "collectives": (time.collectives, "modelled by link rate"),
        "asynchronous ones": (time.asynchronous, "which hide behind the kernels"),
        "between slices": (time.between_slices, "modelled by the network's rate"),
    }
    speed = f"{cost.positions / time.total:,.0f} tokens per second"
    mfu = cost.flops / time.total / peak
    return [
        f"time per step       {time.total:.3g} s, no waiting for memory: predicted, never measured",
        *(f"  {name:<17} {x:.3g} s, {how}" for name, (x, how) in parts.items() if x),
        f"speed               at most {speed}, MFU {mfu:.1%}",
    ]


def advice(config: Any, program: PlannedProgram, accelerator: str, num_shards: int) -> list[str]:
    """A sentence with the options of train that let a program fit; none if it fits."""
    free, training = ACCELERATORS[accelerator].usable_memory, config.training
    if program.memory <= free:
        return []
    accumulation = 2 * num_shards * -(-training.parts // num_shards)
    parts = [f"--training.grad_accumulation {accumulation}"]
    if not training.loss_chunk:
        parts.append(f"--training.loss_chunk {_LOSS_CHUNK}")
    kind = program.name.split()[0]
    tried: list[str] = []
    if kind == "validation":
        tried = parts
    elif kind == "sampling":
        tried = [f"--sampling.max_new_tokens {config.sampling.max_new_tokens // 2}"]
    elif kind == "beam":
        tried = [f"--translation.batch_size {config.translation.batch_size // 2}"]
    elif kind == "step" and program.temporary > free / 2:
        remats = list(REMAT)
        keeping_less = remats[remats.index(training.remat) + 1 :]
        tried = parts + [f"--training.remat {name}" for name in keeping_less]
        if config.model.dtype != "bfloat16":
            tried.append("--model.dtype bfloat16")
    kept = program.memory - program.temporary
    times = 2 ** max(math.ceil(math.log2(2 * kept / free)), 1)
    tried.append(f"--strategy sharded and an fsdp axis {times} times as long")
    return [f"{program.name} needs {gigabytes(program.memory)}: try {' or '.join(tried)}"]


def gigabytes(size: float) -> str:
    """Formats bytes in decimal units: 1.5e9 -> "1.50 GB"."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= one:
            return f"{size / one:.2f} {unit}"
    return f"{size:.0f} B"


def _collective_rows(program: PlannedProgram) -> Iterator[str]:
    """Times per step, bytes per device and step, and devices of each kind of collective."""
    times, sizes = Counter[tuple](), Counter[tuple]()
    for each in collectives(program.program):
        how = "asynchronous" if each.asynchronous else "synchronous"
        where = "in a loop" if each.in_loop else "once"
        kind = (f"{each.kind} {each.dtype}", each.devices, how, where)
        times[kind] += each.times
        sizes[kind] += each.bytes * each.times
    for kind, size in sizes.items():
        name, devices, how, where = kind
        sent = f"{times[kind]:,} times, {gigabytes(size)}, {devices} devices"
        yield f"{name}: {sent}, {how}, {where}"
    if sum_between := between_slices(program.program):
        yield f"{gigabytes(sum_between)} between slices per device"


def _rows(title: str, texts: list[str]) -> list[str]:
    """`texts` in lines of 80 columns, next to and below a title."""
    space = " " * 20
    lines = [
        line
        for text in texts
        for line in textwrap.wrap(text, 80, initial_indent=space, subsequent_indent=space)
    ]
    return [f"{title:<20}{lines[0][20:]}", *lines[1:]] if lines else []
