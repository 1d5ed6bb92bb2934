"""The arrays that devices send each other in a compiled program."""

from collections import Counter
from typing import NamedTuple

import jax

from experiments.harness.planning.counting import COLLECTIVES
from experiments.harness.planning.hlo import Program


class Sent(NamedTuple):
    """The kind of a collective, type and number of elements of its result, whether it is looped."""

    kind: str
    dtype: str
    size: int
    in_loop: bool


def collectives(compiled: jax.stages.Compiled) -> list[Sent]:
    """Every array that is not a scalar; a loop's body counts once."""
    program, found = Program(compiled.as_text() or ""), []
    for _, loops, _, outer in program.executed:
        inside = (
            (each for _, each in program.fused(outer)) if outer.opcode == "fusion" else (outer,)
        )
        for each in inside:
            kind = each.opcode.removesuffix("-start")
            shapes = each.shapes if kind in COLLECTIVES else ()
            if each.opcode == "all-gather-start":  # operands, then results
                shapes = shapes[len(shapes) // 2 :]
            found += [Sent(kind, x.dtype, x.elements, bool(loops)) for x in shapes if x.sizes]
    return found


def elements(found: list[Sent]) -> Counter[tuple[str, str, bool]]:
    """The number of elements by kind, type, and whether they are sent in a loop."""
    sums: Counter[tuple[str, str, bool]] = Counter()
    for each in found:
        sums[each.kind, each.dtype, each.in_loop] += each.size
    return sums
