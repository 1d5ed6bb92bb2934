"""What a compiled program does, read from its text: the arrays it makes and those devices send."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (?P<type>.+?) (?P<opcode>[a-z][\w-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|true_computation|false_computation|branch_computations)=([^ ]+)")
_NO_ARRAY = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple", "while", "call"}


class Sent(NamedTuple):
    """The kind of a collective, type and number of elements of its result, whether it is looped."""

    kind: str
    dtype: str
    size: int
    in_loop: bool


def collectives(compiled: jax.stages.Compiled) -> list[Sent]:
    """Every array that is not a scalar; a loop's body counts once."""
    sent = []
    for kind_of_result, opcode, in_loop, _ in _executed(compiled):
        kind = opcode.removesuffix("-start")
        if re.fullmatch(_KINDS, kind):
            arrays = _ARRAY.findall(kind_of_result)
            if opcode == "all-gather-start":  # operands, then results
                arrays = arrays[len(arrays) // 2 :]
            sent += [Sent(kind, dtype, _size(sizes), in_loop) for dtype, sizes in arrays if sizes]
    return sent


def elements(sent: list[Sent]) -> Counter[tuple[str, str, bool]]:
    """The number of elements by kind, type, and whether they are sent in a loop."""
    sums: Counter[tuple[str, str, bool]] = Counter()
    for each in sent:
        sums[each.kind, each.dtype, each.in_loop] += each.size
    return sums


def count_arrays(compiled: jax.stages.Compiled, shape: str) -> int:
    """The number of arrays such as "f32[2,3]" that the program stores, views left out."""
    return sum(
        kind_of_result.startswith(shape)
        for kind_of_result, opcode, _, in_fusion in _executed(compiled)
        if not in_fusion and opcode not in _NO_ARRAY
    )


def _executed(compiled: jax.stages.Compiled) -> Iterator[tuple[str, str, bool, bool]]:
    """(type of the result, opcode, whether in a loop, whether in a fusion) of each instruction."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in (compiled.as_text() or "").splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            computations[name] = []
            entry = name if head[1] else entry
        elif line == "}":
            name = ""
        elif name and _INSTRUCTION.match(line):
            computations[name].append(line)
        elif name and computations[name]:
            computations[name][-1] += line  # an instruction may go on in the next line

    def run(name: str, in_loop: bool, in_fusion: bool) -> Iterator[tuple[str, str, bool, bool]]:
        for line in computations.get(name, ()):
            instruction = _INSTRUCTION.match(line)
            assert instruction is not None
            opcode = instruction["opcode"]
            yield instruction["type"], opcode, in_loop, in_fusion
            if opcode == "while":
                for body in re.findall(r"body=%?([\w.-]+)", line):
                    yield from run(body, True, in_fusion)
            elif opcode in ("call", "conditional", "fusion"):
                names = _CALLED.findall(line) + re.findall(r"to_apply=([^ ]+)", line)
                for called in re.findall(r"[\w.-]+", " ".join(names)):
                    yield from run(called, in_loop, in_fusion or opcode == "fusion")

    yield from run(entry, False, False)


def _size(sizes: str) -> int:
    return int(np.prod([int(size) for size in sizes.split(",")]))
