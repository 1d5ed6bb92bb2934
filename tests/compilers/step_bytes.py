"""Bytes and kernels of a step of a decoding loop that is compiled for a GPU."""

from typing import NamedTuple

from experiments.harness.planning.counting import moved_bytes
from experiments.harness.planning.hlo import Instruction, Program

_NO_KERNELS = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
}


class Cost(NamedTuple):
    """Bytes, and kernels."""

    bytes: float = 0.0
    kernels: int = 0


def step_cost(program: Program) -> Cost:
    """The cost of one pass of the loop in the entry with the most instructions.

    Of a choice between computations the cheapest counts, as for greedy texts without options.
    """
    bodies = [
        each.loop_body for each in program.computations[program.entry] if each.opcode == "while"
    ]
    return _cost(program, max(bodies, key=lambda body: len(program.computations[body])))


def _cost(program: Program, computation: str) -> Cost:
    total = Cost()
    for each in program.computations[computation]:
        inner = [_cost(program, name) for name in each.called if each.opcode != "fusion"]
        if each.opcode == "conditional":
            more = min(inner)
        elif each.opcode == "call":
            more = inner[0]
        elif each.opcode in _NO_KERNELS:
            continue
        else:
            more = Cost(moved_bytes(program, computation, each) - _unmoved(program, each), 1)
        total = Cost(total.bytes + more.bytes, total.kernels + more.kernels)
    return total


def _unmoved(program: Program, fusion: Instruction) -> float:
    """Bytes of arrays that a fusion updates where they are, but for the update."""
    if fusion.opcode != "fusion":
        return 0.0
    inside = program.computations[fusion.called[0]]
    shapes = {each.name: each.shapes for each in inside}
    total = 0.0
    for each in inside:
        if each.opcode in ("dynamic-update-slice", "scatter"):
            update = shapes[each.operands[1 if each.opcode == "dynamic-update-slice" else 2]]
            total += 2 * (each.shapes[0].bytes - update[0].bytes)
    return total
