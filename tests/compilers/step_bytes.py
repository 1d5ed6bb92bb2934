"""Bytes and kernels of a step of a decoding loop that is compiled for a GPU."""

from typing import NamedTuple

from experiments.harness.planning.counting import moved_bytes
from experiments.harness.planning.hlo import Program

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
            more = Cost(moved_bytes(program, computation, each), 1)
        total = Cost(total.bytes + more.bytes, total.kernels + more.kernels)
    return total
