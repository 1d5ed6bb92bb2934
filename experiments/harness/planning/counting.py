"""Collectives, products, kernels and copies of a compiled program, for one step on one device.

What a loop runs is counted as often as the loop runs it.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.harness.planning.hlo import Executed, Program, Shape, group_size, origin

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_NO_BUFFER = {
    "parameter",
    "constant",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "while",
    "call",
    "conditional",
}
# Custom calls that only name or join memory.
_NO_WORK = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound"}


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

    @property
    def sent(self) -> float:
        """Bytes that a device sends for all of them, around a ring."""
        share = 1.0 if self.kind == "collective-permute" else 1 - 1 / self.devices
        return self.bytes * self.times * share * (2 if self.kind == "all-reduce" else 1)


class Operation(NamedTuple):
    """An operation that a step does `times` in the module `origin`; `text` are its shapes.

    `bytes` is the size of one result, with padding.
    """

    text: str
    bytes: int
    times: int
    origin: str


class Buffer(NamedTuple):
    """Temporary arrays of one size and dtype.

    `shape` is XLA's text of the most frequent shape; `size` is the bytes of one array; `count` the
    number of instructions that make one; `origin` the module of most of them, "loss" or "update"
    outside the model, "" where it is unknown.
    """

    shape: str
    size: int
    count: int  # type: ignore[assignment]  # hides `tuple.count`
    origin: str


def collectives(program: Program) -> list[Collective]:
    """The collectives of a step, the ones that move most first."""
    by_chain: dict[Any, Collective] = {}
    for run in program.executed:
        for chain, each in _collectives_of(program, run):
            # A TPU's kernels that share the steps of one collective have one chain_id.
            by_chain.setdefault((run.loops, chain) if chain else len(by_chain), each)
    return sorted(by_chain.values(), key=lambda each: -each.bytes * each.times)


def between_slices(program: Program) -> int:
    """Bytes that a TPU sends to chips of other slices in a step, over the hosts' network."""
    return sum(
        run.times * run.instruction.shapes[0].bytes
        for run in program.executed
        if run.instruction.opcode == "send" and "is_host_transfer=true" in run.instruction.text
    )


def custom_calls(program: Program) -> Counter[str]:
    """Returns the runs of each custom call by its target; a TPU's kernels have tpu_custom_call.

    Calls that do no work, such as those that join memory, are left out.
    """
    counted: Counter[str] = Counter()
    for run in program.executed:
        if run.instruction.opcode == "custom-call" and run.instruction.target not in _NO_WORK:
            counted[run.instruction.target] += run.times
    return counted


def float32_products(program: Program) -> list[Operation]:
    """The matrix products of a step that have a float32 operand."""
    products = []
    for run in program.executed:
        for computation, each in _with_fused(program, run):
            is_product = each.opcode in ("dot", "convolution")
            if not is_product and not (each.opcode == "custom-call" and "gemm" in each.text):
                continue
            operands = program.operand_shapes(computation, each)[:2]
            if "f32" in [shape.dtype for shape in operands]:
                text = " x ".join(map(str, operands))
                size = each.shapes[0].padded_bytes
                products.append(Operation(text, size, run.times, origin(each.op_name)))
    return products


def copies(program: Program) -> list[Operation]:
    """The copies of a step that change an array's layout, the largest first."""
    changes = []
    for times, _, computation, each in program.executed:
        if each.opcode not in ("copy", "transpose"):
            continue
        (before, *_), after = program.operand_shapes(computation, each), each.shapes[0]
        if each.opcode == "transpose" or _order(before) != _order(after):
            size = after.padded_bytes
            changes.append(Operation(str(after), size, times, origin(each.op_name)))
    return sorted(changes, key=lambda each: -each.bytes * each.times)


def largest_buffers(program: Program, count: int = 5) -> tuple[Buffer, ...]:
    """Returns the `count` largest sizes of temporary arrays of a program, with padding.

    Results inside a fusion have no buffer. Arrays of one size may share memory.
    """
    instructions = {
        (run.computation, run.instruction.name): run.instruction for run in program.executed
    }
    made: dict[tuple[str, int], list[tuple[Shape, str]]] = {}
    for each in instructions.values():
        if each.opcode in _NO_BUFFER or each.opcode.endswith(("-start", "-done")):
            continue
        for shape in each.shapes:
            if shape.sizes and not shape.on_chip:
                key = shape.dtype, shape.padded_bytes
                made.setdefault(key, []).append((shape, origin(each.op_name)))
    largest = sorted(made.items(), key=lambda item: -item[0][1])[:count]
    buffers = []
    for (_, size), arrays in largest:
        shapes = Counter(str(shape) for shape, _ in arrays)
        origins = Counter(name for _, name in arrays if name) or Counter([""])
        ((text, _),), ((module, _),) = shapes.most_common(1), origins.most_common(1)
        buffers.append(Buffer(text, size, len(arrays), module))
    return tuple(buffers)


def _with_fused(program: Program, run: Executed) -> list[tuple[str, Any]]:
    """(computation, instruction) of what `run` does: what it fuses, else the instruction itself."""
    if run.instruction.opcode in ("fusion", "async-start"):
        return list(program.fused(run.instruction))
    return [(run.computation, run.instruction)]


def _collectives_of(program: Program, run: Executed) -> Iterator[tuple[str, Collective]]:
    """(chain_id of a fused one or "", collective); an end is left out, its start has named it."""
    outer = run.instruction
    for computation, each in _with_fused(program, run):
        kind = each.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        operands = program.operand_shapes(computation, each)
        taken, returned = (sum(shape.bytes for shape in part) for part in (operands, each.shapes))
        if each.opcode in ("all-gather-start", "collective-permute-start"):
            returned -= taken  # the start returns its operands too
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # each device keeps a slice of the sum
        chain = re.search(r'chain_id="(\d+)"', each.text) if outer.opcode == "fusion" else None
        yield (
            chain[1] if chain else "",
            Collective(
                kind=kind,
                dtype=" and ".join(sorted({shape.dtype for shape in operands})),
                bytes=max(taken, returned),
                times=run.times,
                devices=group_size(each.text) or program.devices,
                asynchronous=chain is not None or outer.opcode.endswith("-start"),
                in_loop=bool(run.loops),
            ),
        )


def _order(shape: Shape) -> str:
    """The order of the dimensions in memory, of those that are longer than one."""
    axes = shape.layout.partition(":")[0].split(",")
    return ",".join(axis for axis in axes if axis and shape.sizes[int(axis)] > 1)
