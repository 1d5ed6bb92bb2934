"""The arrays that devices send each other in a compiled program, and those that it makes."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.+?) ([\w-]+)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|\w+_computations?)=(\{[^}]*\}|%?[\w.-]+)")


class Sent(NamedTuple):
    """The kind of a collective, type and number of elements of its result, whether it is looped."""

    kind: str
    dtype: str
    size: int
    in_loop: bool


class _Made(NamedTuple):
    """The result of an instruction, as type and sizes of each of its arrays."""

    opcode: str
    arrays: list[tuple[str, str]]
    in_loop: bool
    in_fusion: bool


def collectives(compiled: jax.stages.Compiled) -> list[Sent]:
    """Every array that is not a scalar; a loop's body counts once."""
    sent = []
    for made in _results(compiled):
        kind = made.opcode.removesuffix("-start")
        arrays = made.arrays if kind in COLLECTIVES else []
        if made.opcode == "all-gather-start":  # operands, then results
            arrays = arrays[len(arrays) // 2 :]
        for dtype, sizes in arrays:
            if sizes:
                size = int(np.prod([int(number) for number in sizes.split(",")]))
                sent.append(Sent(kind, dtype, size, made.in_loop))
    return sent


def elements(sent: list[Sent]) -> Counter[tuple[str, str, bool]]:
    """The number of elements by kind, type, and whether they are sent in a loop."""
    sums: Counter[tuple[str, str, bool]] = Counter()
    for each in sent:
        sums[each.kind, each.dtype, each.in_loop] += each.size
    return sums


def count_arrays(compiled: jax.stages.Compiled, dtype: str, shape: tuple[int, ...]) -> int:
    """The number of instructions that make an array of this type and shape in memory.

    Those inside a fusion, and those that only pass it on, do not count.
    """
    views = {"parameter", "constant", "get-tuple-element", "bitcast", "tuple", "while"}
    wanted = dtype, ",".join(map(str, shape))
    return sum(
        wanted in made.arrays
        for made in _results(compiled)
        if not made.in_fusion and made.opcode not in views
    )


def _results(compiled: jax.stages.Compiled) -> Iterator[_Made]:
    """The results of the entry, of its loops and of what these call and fuse."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in (compiled.as_text() or "").splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if head:
            name = head[2]
            entry = name if head[1] else entry
        computations.setdefault(name, []).append(line)

    def run(name: str, in_loop: bool, in_fusion: bool) -> Iterator[_Made]:
        for line in computations.get(name, ()):
            match = _INSTRUCTION.match(line)
            if match is None:
                continue
            kind, opcode = match.groups()
            yield _Made(opcode, re.findall(r"([a-z]\w*)\[([\d,]*)\]", kind), in_loop, in_fusion)
            if opcode not in ("while", "fusion", "call", "conditional"):
                continue
            for names in _CALLED.findall(line):
                for called in names.split(","):
                    inside = in_loop or opcode == "while", in_fusion or opcode == "fusion"
                    yield from run(called.strip(" %{}"), *inside)

    return run(entry, False, False)
