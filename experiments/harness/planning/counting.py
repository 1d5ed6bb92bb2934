"""What a compiled program contains: collectives, kernels, matrix products, copies, bytes, cycles.

Every count is for one step on one device: what a loop runs is counted as often as the loop runs it.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from experiments.harness.planning.hlo import (
    Executed,
    Instruction,
    Program,
    Shape,
    group_size,
    origin,
)

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_NO_KERNEL = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "while",
    "call",
    "conditional",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
}
# Custom calls that only name or join memory.
_NO_WORK = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"}
_IN_PART = {"dynamic-slice", "slice", "gather"}  # read no more than they return


class Collective(NamedTuple):
    """Communication of one kind among groups of `devices`, which a step does `times`.

    `bytes` is what one of them takes or returns on a device, whichever is more. An `asynchronous`
    one runs beside kernels: between a start and an end, or in steps fused with them.
    """

    kind: str
    dtype: str
    bytes: int
    times: int
    devices: int
    asynchronous: bool
    in_loop: bool
    origin: str

    @property
    def sent(self) -> float:
        """Bytes that a device sends for all of them, around a ring."""
        share = 1.0 if self.kind == "collective-permute" else 1 - 1 / self.devices
        return self.bytes * self.times * share * (2 if self.kind == "all-reduce" else 1)


class Product(NamedTuple):
    """A matrix product that a step does `times`; `flops` are those of one."""

    lhs: Shape
    rhs: Shape
    out: Shape
    flops: int
    times: int
    origin: str

    @property
    def dtypes(self) -> str:
        """Such as "bf16 x bf16 -> f32"."""
        return f"{self.lhs.dtype} x {self.rhs.dtype} -> {self.out.dtype}"


class Copy(NamedTuple):
    """Copies of an array into another layout that a step does `times`; `bytes` of one."""

    shape: Shape
    bytes: int
    times: int
    origin: str


def collectives(program: Program) -> list[Collective]:
    """The collectives of a step, the ones that move most first."""
    found: dict[Any, Collective] = {}
    for run in program.executed:
        for chain, each in _collectives_of(program, run):
            # A TPU's kernels that share the steps of one collective have one chain_id.
            found.setdefault((run.loops, chain) if chain else len(found), each)
    return sorted(found.values(), key=lambda each: -each.bytes * each.times)


def count_collectives(program: Program) -> Counter[str]:
    """How often a step does each kind of collective."""
    counted: Counter[str] = Counter()
    for each in collectives(program):
        counted[each.kind] += each.times
    return counted


def between_slices(program: Program) -> int:
    """Bytes that a TPU sends to chips of other slices in a step, over the hosts' network."""
    return sum(
        run.times * run.instruction.shapes[0].bytes
        for run in program.executed
        if run.instruction.opcode == "send" and "is_host_transfer=true" in run.instruction.text
    )


def custom_calls(program: Program) -> Counter[str]:
    """How often a step runs each custom call, by its target; a TPU's kernels have tpu_custom_call.

    Calls that do no work, such as those that join memory, are left out.
    """
    counted: Counter[str] = Counter()
    for run in program.executed:
        if run.instruction.opcode == "custom-call" and run.instruction.target not in _NO_WORK:
            counted[run.instruction.target] += run.times
    return counted


def kernels(program: Program) -> int:
    """How many kernels a step runs; collectives and copies that run beside them do not count."""
    return sum(run.times for run in program.executed if _is_kernel(run.instruction))


def products(program: Program) -> list[Product]:
    """The matrix products of a step, those with the most FLOPs first."""
    found = [each for run in program.executed for each in _products_of(program, run)]
    return sorted(found, key=lambda each: -each.flops * each.times)


def float32_products(found: Iterable[Product]) -> list[Product]:
    """Those with a float32 operand."""
    return [each for each in found if "f32" in (each.lhs.dtype, each.rhs.dtype)]


def copies(program: Program) -> list[Copy]:
    """The copies of a step that change an array's layout, the largest first."""
    found = []
    for times, _, computation, each in program.executed:
        if each.opcode not in ("copy", "transpose"):
            continue
        (before, *_), after = program.operand_shapes(computation, each), each.shapes[0]
        if each.opcode == "transpose" or _order(before) != _order(after):
            found.append(Copy(after, after.padded_bytes, times, origin(each.op_name)))
    return sorted(found, key=lambda each: -each.bytes * each.times)


def padding(program: Program) -> list[tuple[Shape, int]]:
    """(shape, bytes of one array that pad its tiles) of results in main memory, worst first."""
    wasted = {
        shape: shape.padded_bytes - shape.bytes
        for run in program.executed
        if run.instruction.opcode not in _NO_KERNEL - {"parameter"}
        for shape in run.instruction.shapes
        if not shape.on_chip
    }
    found = [(shape, waste) for shape, waste in wasted.items() if waste]
    return sorted(found, key=lambda pair: -pair[1])


def traffic(program: Program) -> int:
    """Bytes that the kernels of a step read from and write to a device's main memory.

    Padding counts. Of an operand of which a kernel only reads slices, the slices count; of one that
    it updates in place, the update.
    """
    return sum(
        run.times * _moved(program, run.computation, run.instruction)
        for run in program.executed
        if _is_kernel(run.instruction) or run.instruction.opcode == "copy-start"
    )


def cycles(program: Program) -> Counter[str]:
    """A TPU compiler's estimated cycles of a step, by the module that the kernel belongs to.

    They leave out Mosaic kernels, sorts and collectives.
    """
    counted: Counter[str] = Counter()
    for run in program.executed:
        counted[origin(run.instruction.op_name)] += run.times * run.instruction.cycles
    return +counted


def _is_kernel(instruction: Instruction) -> bool:
    opcode = instruction.opcode
    base = re.sub(r"-(start|update|done)$", "", opcode)
    return not (
        opcode in _NO_KERNEL
        or base != opcode
        or base in COLLECTIVES
        or instruction.target in _NO_WORK
    )


def _collectives_of(program: Program, run: Executed) -> Iterator[tuple[str, Collective]]:
    """(chain_id of a fused one or "", collective); an end is left out, its start has named it."""
    times, loops, computation, outer = run
    inside = [(computation, outer)]
    if outer.opcode in ("fusion", "async-start"):
        inside = list(program.fused(outer))
    for where, each in inside:
        kind = each.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        taken = program.operand_shapes(where, each)
        size, given = (sum(shape.bytes for shape in part) for part in (taken, each.shapes))
        if each.opcode in ("all-gather-start", "collective-permute-start"):
            given -= size  # the start returns its operands too
        if kind == "all-reduce" and where.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # each device keeps a slice of the sum
        chain = re.search(r'chain_id="(\d+)"', each.text) if outer.opcode == "fusion" else None
        yield (
            chain[1] if chain else "",
            Collective(
                kind=kind,
                dtype=" and ".join(sorted({shape.dtype for shape in taken})),
                bytes=max(size, given),
                times=times,
                devices=group_size(each.text) or program.devices,
                asynchronous=chain is not None or outer.opcode.endswith("-start"),
                in_loop=bool(loops),
                origin=origin(each.op_name or outer.op_name),
            ),
        )


def _products_of(program: Program, run: Executed) -> Iterator[Product]:
    times, _, computation, outer = run
    inside = [(computation, outer)]
    if outer.opcode == "fusion":
        inside = list(program.fused(outer))
    for where, each in inside:
        count = _FLOPS.get(each.opcode)
        if count is None or (each.opcode == "custom-call" and "gemm" not in each.text):
            continue
        lhs, rhs, *_ = program.operand_shapes(where, each)
        flops = count(lhs, rhs, each)
        yield Product(lhs, rhs, each.shapes[0], flops, times, origin(each.op_name))


def _dot_flops(lhs: Shape, rhs: Shape, dot: Instruction) -> int:
    contracted = re.search(r"lhs_contracting_dim(?:ension)?s[\"=:]+[{\[]([\d,\"]*)", dot.text)
    axes = re.findall(r"\d+", contracted[1]) if contracted else ()
    return 2 * dot.shapes[0].elements * math.prod(lhs.sizes[int(axis)] for axis in axes)


def _convolution_flops(lhs: Shape, rhs: Shape, convolution: Instruction) -> int:
    """Two per multiply-add of values that are there: those in padding and dilation are not."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.text)
    assert labels is not None  # every convolution has them
    left, right, out = labels.groups()
    result = convolution.shapes[0]
    batch = result.sizes[out.index("b")] * result.sizes[out.index("f")]
    adds = batch * rhs.sizes[right.index("i")]
    window = dict(re.findall(r"(\w+)=([\dx_-]+)", _window(convolution.text)))
    for axis in sorted(filter(str.isdigit, out)):
        size, taps = lhs.sizes[left.index(axis)], rhs.sizes[right.index(axis)]
        adds *= _positions(size, taps, result.sizes[out.index(axis)], window, int(axis))
    return 2 * adds


def _positions(size: int, taps: int, outputs: int, window: dict[str, str], axis: int) -> int:
    """The pairs (output, tap) of one axis of a convolution that meet a value of the input."""

    def value(name: str, default: str) -> str:
        return window[name].split("x")[axis] if name in window else default

    stride, dilation = int(value("stride", "1")), int(value("rhs_dilate", "1"))
    base, low = int(value("lhs_dilate", "1")), int(value("pad", "0_0").split("_")[0])
    last = (size - 1) * base
    starts = Counter(output * stride - low for output in range(outputs))
    return sum(
        count
        for start, count in starts.items()
        for at in range(start, start + taps * dilation, dilation)
        if 0 <= at <= last and at % base == 0
    )


def _window(text: str) -> str:
    found = re.search(r"window=\{([^}]*)\}", text)
    return found[1] if found else ""


_FLOPS = {"dot": _dot_flops, "convolution": _convolution_flops, "custom-call": _dot_flops}


def _order(shape: Shape) -> str:
    """The order of the dimensions in memory, of those that are longer than one."""
    axes = shape.layout.partition(":")[0].split(",")
    return ",".join(axis for axis in axes if axis and shape.sizes[int(axis)] > 1)


def _moved(program: Program, computation: str, instruction: Instruction) -> int:
    """Bytes that one run of a kernel moves between main memory and the chip."""
    written = list(instruction.shapes)
    if instruction.opcode == "copy-start":
        return sum(shape.padded_bytes for shape in written[:2] if not shape.on_chip)
    read = program.operand_shapes(computation, instruction)
    if instruction.opcode in _IN_PART:
        read = written
    elif instruction.opcode == "dynamic-update-slice":
        read = written = read[1:2]
    elif instruction.opcode == "fusion":
        read, written = _parts(program, instruction, read)
    return sum(shape.padded_bytes for shape in (*read, *written) if not shape.on_chip)


def _parts(
    program: Program, fusion: Instruction, read: list[Shape]
) -> tuple[list[Shape], list[Shape]]:
    """What a fused kernel reads and writes, with slices in place of the arrays that they are of."""
    inside = program.computations.get(next(iter(fusion.called), ""), [])
    users: defaultdict[str, list[Instruction]] = defaultdict(list)
    for each in inside:
        for name in each.operands:
            users[name].append(each)
    named = {each.name: each for each in inside}
    parameters = [each for each in inside if each.opcode == "parameter"]
    numbers = {
        int(re.sub(r"\D*(\d+).*", r"\1", each.text, flags=re.DOTALL)): each.name
        for each in parameters
    }
    taken: list[Shape] = []
    for number, shape in enumerate(read):
        using = users[numbers.get(number, "")]
        if using and all(_reads_part(each, numbers[number]) for each in using):
            taken += [part for each in using for part in each.shapes]
        elif not (using and all(_updates(each, numbers[number]) for each in using)):
            taken.append(shape)
    roots = [each for each in inside if each.is_root]
    if roots and roots[0].opcode == "tuple":
        roots = [named[name] for name in roots[0].operands if name in named]
    given: list[Shape] = []
    for root in roots:
        updated = root.opcode == "dynamic-update-slice" and root.operands[1] in named
        given += named[root.operands[1]].shapes if updated else root.shapes
    # The memory of a result is said by the fusion alone.
    kept = [shape for shape in fusion.shapes if not shape.on_chip]
    return taken, (given if kept else [])


def _reads_part(instruction: Instruction, name: str) -> bool:
    """Whether no more than a slice of the array `name` is read."""
    return instruction.opcode in _IN_PART and instruction.operands[0] == name


def _updates(instruction: Instruction, name: str) -> bool:
    """Whether the array `name` is updated in place."""
    return instruction.opcode == "dynamic-update-slice" and instruction.operands[0] == name
