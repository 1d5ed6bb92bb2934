"""Reads a compiled program's text (HLO): its instructions, their shapes, how often each runs.

A program is a set of computations. The entry runs once, the body of a loop as often as the loop
says; a fused computation is one kernel. Text of CPUs, GPUs and TPUs is read.
"""

import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+)$", re.DOTALL)
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"(?:calls|to_apply|true_computation|false_computation|branch_computations|called_computations)"
    r"=(\{[^}]*\}|%?[\w.-]+)"
)
_NUMBER = re.compile(r"\((\d+)\)")
_BITS = {"pred": 8, "token": 0}
"""Bits of the types whose names do not say them, as `f32` does."""
WITHOUT_BUFFER = {
    "parameter",
    "constant",
    "get-tuple-element",
    "bitcast",
    "tuple",
    "while",
    "call",
    "conditional",
}
"""Operations that compute nothing, and whose results have no memory of their own."""
_DEVICE_COUNTS = ("num_partitions", "replica_count")
"""Numbers in a program's head whose product is the number of its devices."""


class Shape(NamedTuple):
    """An array's dtype, sizes and layout, such as `2,1,0:T(8,128)(2,1)S(1)`."""

    dtype: str
    sizes: tuple[int, ...]
    layout: str = ""

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return _bytes(self.dtype, self.sizes)

    @property
    def padded_bytes(self) -> int:
        """Bytes with the minor dimensions padded to whole tiles, as a TPU stores them."""
        tile = re.search(r"T\(([\d,]+)\)", self.layout)
        if tile is None or not self.sizes:
            return self.bytes
        sizes = list(self.sizes)
        minor_first = _integers(self.layout.partition(":")[0])
        for axis, size in zip(minor_first, reversed(_integers(tile[1])), strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
        return _bytes(self.dtype, sizes)

    @property
    def on_chip(self) -> bool:
        """Whether the array is in a memory other than the device's main one."""
        return re.search(r"S\([1-9]", self.layout) is not None

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.sizes))}]"


class Instruction(NamedTuple):
    """One line of a program.

    `shapes` are the arrays of the result, flattened where it is a tuple; `operands` the names of
    instructions of the same computation; `text` the line after the opcode.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str

    @property
    def target(self) -> str:
        """The target of a custom call, else ""."""
        return _first(r'custom_call_target="([^"]*)"', self.text)

    @property
    def op_name(self) -> str:
        """JAX's path of the operation, such as jit(step)/jvp(DecoderOnly)/decoder/..., else ""."""
        return _first(r'op_name="([^"]*)"', self.text)

    @property
    def cycles(self) -> int:
        """A TPU compiler's `estimated_cycles`; 0 where it gives none."""
        return int(_first(r'estimated_cycles":"?(\d+)', self.text) or 0)

    @property
    def loop_body(self) -> str:
        """The computation that a `while` repeats."""
        return _first(r"body=%?([\w.-]+)", self.text)

    @property
    def called(self) -> list[str]:
        """The computations that it calls or fuses, without the body of a loop."""
        groups = (group.split(",") for group in _CALLED.findall(self.text))
        return [name.strip(" %{}") for names in groups for name in names]


class Executed(NamedTuple):
    """An instruction of `computation` that a device runs `times` a step.

    `loops` are the names of the bodies of the loops around it, the outermost first.
    """

    times: int
    loops: tuple[str, ...]
    computation: str
    instruction: Instruction


class Program:
    """The text of a compiled program, parsed.

    Attributes:
      computations: name -> instructions in order.
      entry: the name of the computation that runs once.
      devices: how many devices run the program together.
      executed: the instructions of the entry, of its loops and of what these call, in order.
      unknown_loops: bodies of loops whose trip count the text does not tell; they count as one.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry: str = ""
        self.unknown_loops: set[str] = set()
        counts = (_first(rf"^HloModule .*{key}=(\d+)", text) for key in _DEVICE_COUNTS)
        self.devices: int = math.prod(int(count or 1) for count in counts)
        for name, is_entry, lines in _computations(text):
            self.computations[name] = [_parse(line) for line in lines]
            self.entry = name if is_entry else self.entry
        self.executed: list[Executed] = list(self._run(self.entry, 1, ()))

    def fused(self, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """(computation, instruction) of everything that the kernel `instruction` fuses."""
        for name in instruction.called:
            for inner in self.computations.get(name, ()):
                yield name, inner
                yield from self.fused(inner)

    def done_by(self, run: Executed) -> list[tuple[str, Instruction]]:
        """(computation, instruction) of all that `run` fuses, else of its instruction alone."""
        if run.instruction.opcode in ("fusion", "async-start"):
            return list(self.fused(run.instruction))
        return [(run.computation, run.instruction)]

    def operand_shapes(self, computation: str, instruction: Instruction) -> list[Shape]:
        """The arrays that go into an instruction of `computation`."""
        known = self._shapes[computation]
        return [shape for name in instruction.operands for shape in known.get(name, ())]

    @cached_property
    def _shapes(self) -> dict[str, dict[str, tuple[Shape, ...]]]:
        return {
            name: {each.name: each.shapes for each in instructions}
            for name, instructions in self.computations.items()
        }

    def _run(self, name: str, times: int, loops: tuple[str, ...]) -> Iterator[Executed]:
        for instruction in self.computations.get(name, ()):
            yield Executed(times, loops, name, instruction)
            if instruction.opcode == "while":
                body = instruction.loop_body
                trips = self._trip_count(instruction)
                if trips is None:
                    self.unknown_loops.add(body)
                yield from self._run(body, times * (trips or 1), (*loops, body))
            elif instruction.opcode in ("call", "conditional"):
                for called in instruction.called:
                    yield from self._run(called, times, loops)

    def _trip_count(self, loop: Instruction) -> int | None:
        """How often the loop runs, as its text tells; None where it does not.

        Either the text says it, or the condition is `counter < bound`, with a counter from 0.
        """
        known = _first(r"known_trip_count\D*(\d+)", loop.text)
        if known:
            return int(known)
        condition = _first(r"condition=%?([\w.-]+)", loop.text)
        inside = list(self.computations.get(condition, ()))
        for outer in tuple(inside):
            inside += [fused for _, fused in self.fused(outer)]
        compares = [each for each in inside if each.opcode == "compare"]
        constants = [each.text for each in inside if each.opcode == "constant"]
        bounds = {int(match[1]) for match in map(_NUMBER.match, constants) if match}
        if len(compares) != 1 or len(bounds) != 1 or "direction=LT" not in compares[0].text:
            return None
        (bound,) = bounds
        counters = {_first(r"index=(\d+)", each.text) for each in inside} - {""}
        step = 1
        if len(counters) == 1:
            (counter,) = counters
            step = self._step(loop.loop_body, int(counter))
        return math.ceil(bound / step)

    def _step(self, body: str, counter: int) -> int:
        """The step by which a loop raises an element of its tuple; 1 where the text hides it.

        A product that is divided over a ring of devices takes two steps in one pass.
        """
        inside = {each.name: each for each in self.computations.get(body, ())}
        *_, root = inside.values()
        if counter >= len(root.operands):
            return 1
        next_value = inside.get(root.operands[counter])
        if next_value is None or next_value.opcode != "add":
            return 1
        for name in next_value.operands:
            if name in inside and inside[name].opcode == "constant":
                return max(int(_first(r"^\((\d+)\)", inside[name].text) or 1), 1)
        return 1


def group_size(text: str) -> int:
    """The number of devices that a collective joins, by its `replica_groups`; 0: all of them."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", text)
    if iota:
        return int(iota[2])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", text)
    if listed:
        return listed[1].count(",") + 1
    axes = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text)
    if axes is None:
        return 0
    sizes = dict(re.findall(r"('[^']*')=(\d+)", axes[1]))
    return math.prod(int(sizes.get(name, 1)) for name in re.findall(r"'[^']*'", axes[2]))


def _computations(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """(name, whether it is the entry, lines); a line that goes on is joined to its beginning."""
    name, is_entry = "", False
    lines: list[str] = []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name, is_entry, lines = head[2], bool(head[1]), []
        elif line == "}":
            yield name, is_entry, lines
            name, lines = "", []
        elif name and _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:
            lines[-1] += line


def _parse(line: str) -> Instruction:
    """The instruction that `line` holds; layouts hold brackets but no blanks."""
    name, text = _INSTRUCTION.findall(line)[0]
    end = _closing(text) if text.startswith("(") else text.find(" ")
    opcode, _, text_after = text[end:].lstrip().partition("(")
    arguments = f"({text_after}"
    shapes = tuple(
        Shape(dtype, tuple(_integers(sizes)), layout)
        for dtype, sizes, layout in _ARRAY.findall(text[:end])
    )
    operands = tuple(re.findall(r"%([\w.-]+)", arguments[: _closing(arguments)]))
    return Instruction(name, opcode, shapes, operands, arguments)


def _closing(text: str) -> int:
    """The end of the bracketed group that `text` begins with."""
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.end()
    return len(text)


def _bytes(dtype: str, sizes: tuple[int, ...] | list[int]) -> int:
    bits = _BITS.get(dtype)
    if bits is None:
        bits = int(re.sub(r"^\D*(\d+).*$", r"\1", dtype)) if re.search(r"\d", dtype) else 32
    return math.prod(sizes) * bits // 8


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.isdecimal()]


def _first(pattern: str, text: str) -> str:
    """The first group of the first match, else ""."""
    match = re.search(pattern, text)
    return match[1] if match else ""
