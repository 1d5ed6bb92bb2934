"""The work of a compiled program: FLOPs of its products, bytes that its kernels move.

It is counted for one step on one device. The body of a loop counts as often as the loop runs it.
"""

import math
import re
from collections import Counter
from functools import cache
from typing import NamedTuple

import numpy as np

from experiments.harness.planning.hlo import WITHOUT_BUFFER, Instruction, Program, Shape

_CUBLAS = "__cublas$"
"""The targets of products of NVIDIA's library; the last of several results is memory to work in."""
_READ_IN_PART = ("dynamic-slice", "slice", "gather")
_UPDATE = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that change a part of their first operand: the number of the operand with the part."""
_MIXING = (
    "call",
    "convolution",
    "custom-call",
    "dot",
    "fusion",
    "reduce",
    "reduce-window",
    "sort",
    *_UPDATE,
)
"""Operations with results that need more than the element of an operand at their own place."""


class Work(NamedTuple):
    """A device's work in a step: FLOPs of matrix products, and bytes that kernels move."""

    flops: float
    bytes: float


def work(program: Program) -> Work:
    """FLOPs of the products, and bytes that kernels read and write, in memory or on the chip.

    The body of a loop counts as often as it runs, unlike in XLA's own cost analysis, and each
    computation of a choice counts. Kernels that XLA does not see into, such as flash attention,
    have bytes but no FLOPs.
    """
    flops = moved = 0.0
    for run in program.executed:
        each = run.instruction
        for computation, inner in program.done_by(run):
            flops += run.times * product_flops(program, computation, inner)
        if each.opcode not in WITHOUT_BUFFER and not each.opcode.endswith("-done"):
            moved += run.times * moved_bytes(program, run.computation, each)
    return Work(flops, moved)


def product_flops(program: Program, computation: str, each: Instruction) -> float:
    """2 for each multiply-add of a matrix product or convolution, else 0."""
    operands = program.operand_shapes(computation, each)
    if len(operands) < 2 or not each.shapes:
        return 0.0
    if each.opcode == "dot":
        summed = _axes(r"lhs_contracting_dims=\{([\d,]*)\}", each.text)
    elif each.target.startswith(_CUBLAS):
        summed = _axes(r'"lhs_contracting_dimensions":\[([^\]]*)\]', each.text)
    elif each.opcode == "convolution":
        return _convolution_flops(each, operands)
    else:
        return 0.0
    return 2.0 * math.prod(each.shapes[0].sizes) * math.prod(operands[0].sizes[i] for i in summed)


def _axes(pattern: str, text: str) -> list[int]:
    """The numbers in the first group of the first match of `pattern`."""
    match = re.search(pattern, text)
    return [int(axis) for axis in re.findall(r"\d+", match[1])] if match else []


def _convolution_flops(each: Instruction, operands: list[Shape]) -> float:
    """2 for each multiply-add of a convolution with an element that is no padding and no hole.

    A TPU's compiler writes products as convolutions. A batch is then an axis with holes, and heads
    may be an axis with so much padding that one element of the window meets data at a time.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.text)
    if labels is None:
        return 0.0
    arrays = (*operands[:2], each.shapes[0])
    inputs, kernel, results = (
        dict(zip(letters, shape.sizes, strict=True))
        for letters, shape in zip(labels.groups(), arrays, strict=True)
    )
    window = re.search(r"window=\{([^}]*)\}", each.text)
    options = dict(option.split("=") for option in window[1].split()) if window else {}

    def option(name: str, axis: int, default: str) -> str:
        return options[name].split("x")[axis] if name in options else default

    pairs = 1
    for letter in filter(str.isdecimal, inputs):
        axis = int(letter)
        pairs *= _meeting_pairs(
            inputs[letter],
            kernel[letter],
            results[letter],
            padding=int(option("pad", axis, "0_0").partition("_")[0]),
            stride=int(option("stride", axis, "1")),
            input_dilation=int(option("lhs_dilate", axis, "1")),
            window_dilation=int(option("rhs_dilate", axis, "1")),
        )
    return 2.0 * pairs * results["b"] * results["f"] * kernel["i"]


@cache
def _meeting_pairs(
    size: int,
    window: int,
    results: int,
    *,
    padding: int,
    stride: int,
    input_dilation: int,
    window_dilation: int,
) -> int:
    """The pairs of a result and a window element that meet one of the `size` inputs of an axis."""
    first = np.arange(results) * stride - padding
    count = 0
    for element in range(window):
        place = first + element * window_dilation
        is_inside = (place >= 0) & (place <= (size - 1) * input_dilation)
        count += int(np.count_nonzero(is_inside & (place % input_dilation == 0)))
    return count


def moved_bytes(program: Program, computation: str, each: Instruction) -> float:
    """Bytes that a kernel reads and writes: its operands and results, or parts of them.

    An operand is read in part where only slices of it are used, also of a converted or otherwise
    element-wise changed one. A result is written in part where it is an operand with a new slice.
    The memory that a product of cuBLAS may work in is no result.
    """
    has_memory = each.target.startswith(_CUBLAS) and len(each.shapes) > 1
    shapes = each.shapes[:-1] if has_memory else each.shapes
    results = sum(shape.bytes for shape in shapes)
    if each.opcode in _READ_IN_PART:
        return 2.0 * results
    operands = program.operand_shapes(computation, each)
    if len(operands) != len(each.operands):  # a tuple among them
        return float(results + sum(shape.bytes for shape in operands))
    if each.opcode in _UPDATE:
        return float(2 * operands[_UPDATE[each.opcode]].bytes)
    if each.opcode != "fusion":
        return float(results + sum(shape.bytes for shape in operands))
    inside = _Fused(program.computations.get(each.called[0], []))
    return float(inside.written_bytes() + inside.read_bytes())


class _Fused:
    """A fused computation: one kernel."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.instructions = instructions
        self.by_name = {each.name: each for each in instructions}
        root = instructions[-1]
        outputs = root.operands if root.opcode == "tuple" else (root.name,)
        self.outputs = [self.by_name[name] for name in outputs]

    def updates(self, output: Instruction) -> list[Instruction]:
        """The updates that make `output` of a parameter, in place; none if it is another array."""
        updates = []
        each = output
        while each.opcode in (*_UPDATE, "bitcast"):
            if each.opcode in _UPDATE:
                updates.append(each)
            each = self.by_name[each.operands[0]]
        return updates if each.opcode == "parameter" else []

    def written_bytes(self) -> int:
        """Bytes of the results; an updated one counts the bytes of its updates."""
        total = 0
        for output in self.outputs:
            updates = self.updates(output)
            news = [self.by_name[each.operands[_UPDATE[each.opcode]]] for each in updates]
            total += sum(shape.bytes for new in news or [output] for shape in new.shapes)
        return total

    def read_bytes(self) -> int:
        """Bytes of the elements of the parameters that the results need."""
        sizes = {each.name: _elements(each) for each in self.instructions}
        in_place = {each.name for output in self.outputs for each in self.updates(output)}
        needed = Counter({output.name: sizes[output.name] for output in self.outputs})
        total = 0
        for each in reversed(self.instructions):
            asked = min(needed[each.name], sizes[each.name])
            if each.opcode == "parameter":
                whole = sum(shape.bytes for shape in each.shapes)
                total += whole * asked // max(sizes[each.name], 1)
            for position, operand in enumerate(each.operands):
                if each.name in in_place and position == 0:
                    continue
                if each.opcode in _READ_IN_PART and position == 0:
                    needed[operand] += asked
                elif each.opcode in _MIXING or sizes[operand] != sizes[each.name]:
                    needed[operand] += sizes[operand]
                else:
                    needed[operand] += asked
        return total


def _elements(each: Instruction) -> int:
    return sum(math.prod(shape.sizes) for shape in each.shapes)
