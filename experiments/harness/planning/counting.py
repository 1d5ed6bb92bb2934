"""Collectives and arrays of a compiled program, for one step on one device.

What a loop runs is counted as often as the loop runs it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.harness.planning.hlo import Executed, Instruction, Program, group_size

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


_READ_IN_PART = ("dynamic-slice", "slice", "gather")


class Work(NamedTuple):
    """What a device does in a step: FLOPs of matrix products, and bytes that kernels move."""

    flops: float
    bytes: float


class Collective(NamedTuple):
    """Communication of one kind among groups of `devices`, which a step does `times`.

    `bytes` is what one of them takes or returns on a device, whichever is more. An `asynchronous`
    one runs while kernels compute: between a start and an end, or in steps fused with them.
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


def collectives(program: Program) -> list[Collective]:
    """The collectives of a step, the ones that move most first."""
    by_chain: dict[Any, Collective] = {}
    for run in program.executed:
        for chain, each in _collectives_of(program, run):
            # A TPU's kernels that share the steps of one collective have one chain_id.
            by_chain.setdefault((run.loops, chain) if chain else len(by_chain), each)
    return sorted(by_chain.values(), key=lambda each: -each.bytes * each.times)


def work(program: Program) -> Work:
    """FLOPs of the products, and bytes that kernels read and write, in memory or on the chip.

    What a loop runs counts as often as it runs, unlike in XLA's own cost analysis. Kernels that XLA
    does not see into, such as flash attention, have bytes but no FLOPs.
    """
    flops = moved = 0.0
    for run in program.executed:
        each = run.instruction
        for computation, inner in _with_fused(program, run):
            flops += run.times * _product_flops(program, computation, inner)
        if each.opcode not in _NO_BUFFER and not each.opcode.endswith("-done"):
            moved += run.times * moved_bytes(program, run.computation, each)
    return Work(flops, moved)


def _product_flops(program: Program, computation: str, each: Instruction) -> float:
    """2 for each multiply-add of a matrix product or convolution, else 0."""
    if each.opcode not in ("dot", "convolution") or not each.shapes:
        return 0.0
    operands = program.operand_shapes(computation, each)
    if len(operands) < 2:
        return 0.0
    results = math.prod(each.shapes[0].sizes)
    if each.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.text)
        axes = [int(axis) for axis in summed[1].split(",") if axis] if summed else []
        return 2.0 * results * math.prod(operands[0].sizes[axis] for axis in axes)
    labels = re.search(r"dim_labels=\w+_(\w+)->", each.text)
    window = re.search(r"window=\{([^}]*)\}", each.text)
    if labels is None:
        return 0.0
    summed_size = operands[1].sizes[labels[1].index("i")]
    spatial = re.search(r"size=([\dx]+)", window[1] if window else "")
    dilated = re.search(r"(?:lhs|rhs)_dilate=([\dx]+)", window[1] if window else "")
    sizes = [int(size) for size in spatial[1].split("x")] if spatial else []
    dilations = [int(size) for size in dilated[1].split("x")] if dilated else [1] * len(sizes)
    # A TPU's batched product is a convolution that is dilated along the batch.
    taps = math.prod(size for size, dilation in zip(sizes, dilations, strict=True) if dilation == 1)
    return 2.0 * results * summed_size * taps


def moved_bytes(program: Program, computation: str, each: Instruction) -> float:
    """Bytes of the results, and of the operands or the parts of them that are read."""
    results = sum(shape.bytes for shape in each.shapes)
    operands = program.operand_shapes(computation, each)
    if each.opcode in _READ_IN_PART:
        return 2.0 * results
    parts = _parts_read(program, each) if each.opcode == "fusion" else {}
    if len(operands) != len(each.operands):  # a tuple among them
        parts = {}
    read = sum(parts.get(number, shape.bytes) for number, shape in enumerate(operands))
    return float(results + read)


def _parts_read(program: Program, fusion: Instruction) -> dict[int, int]:
    """Bytes that a fusion reads of each parameter of which it only takes slices, by its number."""
    parts = {}
    for name in fusion.called:
        inside = program.computations.get(name, ())
        for each in inside:
            number = re.match(r"\((\d+)\)", each.text)
            users = [user for user in inside if each.name in user.operands]
            if each.opcode != "parameter" or number is None or not users:
                continue
            if all(
                user.opcode in _READ_IN_PART and user.operands[0] == each.name for user in users
            ):
                parts[int(number[1])] = sum(user.shapes[0].bytes for user in users)
    return parts


def between_slices(program: Program) -> int:
    """Bytes that a TPU sends to chips of other slices in a step, over the hosts' network."""
    return sum(
        run.times * run.instruction.shapes[0].bytes
        for run in program.executed
        if run.instruction.opcode == "send" and "is_host_transfer=true" in run.instruction.text
    )


def largest_arrays(program: Program, count: int = 5) -> list[tuple[int, str, int]]:
    """(bytes with padding, shape, instructions) of the `count` largest arrays in memory.

    Results inside a fusion are not in memory. Arrays of one size may share memory.
    """
    made = {(run.computation, run.instruction.name): run.instruction for run in program.executed}
    arrays = Counter(
        (shape.padded_bytes, str(shape))
        for each in made.values()
        if each.opcode not in _NO_BUFFER and not each.opcode.endswith(("-start", "-done"))
        for shape in each.shapes
        if shape.sizes and not shape.on_chip
    )
    largest = sorted(arrays.items(), reverse=True)[:count]
    return [(size, text, number) for (size, text), number in largest]


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
