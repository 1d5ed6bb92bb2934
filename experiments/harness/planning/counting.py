"""Collectives and arrays of a compiled program, for one step on one device.

What a loop runs is counted as often as the loop runs it.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.harness.planning.hlo import Executed, Program, group_size

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
