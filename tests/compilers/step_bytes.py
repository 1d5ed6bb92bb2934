"""Bytes and kernels of a step of a compiled decoding loop."""

import math
from typing import NamedTuple

from experiments.harness.planning.hlo import Instruction, Program
from experiments.harness.planning.work import moved_bytes

_NO_KERNELS = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    # A TPU fetches what a kernel will read into the memory on its chip.
    "copy-start",
    "copy-done",
    "slice-start",
    "slice-done",
}
_JOINED = "ConcatBitcast"
"""The target of what joins fetched slices."""

_LANES, _SUBLANES = 128, 16
"""Positions of the tiles of keys and of values in 16 bits that `write_rows` reads and writes."""


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
        if each.opcode == "conditional":
            more = min(_cost(program, name) for name in each.called)
        elif each.opcode == "call":
            more = _cost(program, each.called[0])
        elif each.opcode in _NO_KERNELS or each.target == _JOINED:
            continue
        else:
            more = Cost(_bytes_of(program, computation, each), 1)
        total = Cost(total.bytes + more.bytes, total.kernels + more.kernels)
    return total


def _bytes_of(program: Program, computation: str, each: Instruction) -> float:
    """The bytes that a kernel reads and writes."""
    if "write_rows" in each.op_name and each.opcode == "custom-call":
        key, value = each.shapes
        rows, heads, size, length = key.sizes
        in_lanes = value.sizes[3] == length  # the positions of values
        value_tile = value.sizes[2] * _LANES if in_lanes else value.sizes[3] * _SUBLANES
        numbers = rows * heads * (size * _LANES + value_tile)
        return 2.0 * numbers * key.bytes / math.prod(key.sizes)
    return moved_bytes(program, computation, each)
