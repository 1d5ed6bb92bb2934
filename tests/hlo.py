"""The arrays that devices send each other in a compiled program, and those that it makes."""

import math
from collections import Counter
from typing import NamedTuple

import jax

from experiments.harness.planning.collectives import COLLECTIVES
from experiments.harness.planning.hlo import Program

VIEWS = ("parameter", "constant", "get-tuple-element", "bitcast", "tuple", "while")


class Sent(NamedTuple):
    """The kind of a collective, type and number of elements of its result, whether it is looped."""

    kind: str
    dtype: str
    size: int
    in_loop: bool


def collectives(compiled: jax.stages.Compiled) -> list[Sent]:
    """Every array that is not a scalar; a loop's body counts once."""
    program, sent = Program(compiled.as_text() or ""), []
    for run in program.executed:
        fused = program.fused(run.instruction) if run.instruction.opcode == "fusion" else ()
        for each in (run.instruction, *(inner for _, inner in fused)):
            kind = each.opcode.removesuffix("-start")
            shapes = each.shapes if kind in COLLECTIVES else ()
            if each.opcode == "all-gather-start":  # operands, then results
                shapes = shapes[len(shapes) // 2 :]
            for shape in shapes:
                if shape.sizes:
                    sent.append(Sent(kind, shape.dtype, math.prod(shape.sizes), bool(run.loops)))
    return sent


def elements(sent: list[Sent]) -> Counter[tuple[str, str, bool]]:
    """The number of elements by kind, type, and whether they are sent in a loop."""
    sums: Counter[tuple[str, str, bool]] = Counter()
    for each in sent:
        sums[each.kind, each.dtype, each.in_loop] += each.size
    return sums


def count_arrays(compiled: jax.stages.Compiled, dtype: str, sizes: tuple[int, ...]) -> int:
    """The number of instructions that make an array of this type and shape in memory.

    Those inside a fusion, and those that only pass it on, do not count.
    """
    made = (run.instruction for run in Program(compiled.as_text() or "").executed)
    return sum(
        (dtype, sizes) in [shape[:2] for shape in each.shapes]
        for each in made
        if each.opcode not in VIEWS
    )
