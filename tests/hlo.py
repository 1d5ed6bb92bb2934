"""What devices send each other in a compiled program, read from XLA's text of it."""

import re
from collections import Counter
from math import prod
from typing import NamedTuple

import jax

_KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
_COLLECTIVE = re.compile(rf"%?([\w.-]+) = (.*?) ({_KINDS})(-start)?\((.*?)\)")
_CALLS = re.compile(r"\b(body|condition|calls|to_apply)=%?([\w.-]+)")


class Collective(NamedTuple):
    """One instruction: its kind, the type and number of elements of its results, and its place."""

    kind: str
    dtype: str
    size: int
    in_loop: bool


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """The collectives of more than scalars, one for each array; a loop's body counts once."""
    found, calls, loops, here = [], {}, set(), ""
    for line in (compiled.as_text() or "").splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        here = head[1] if head else here
        for how, called in _CALLS.findall(line):
            calls.setdefault(here, set()).add(called)
            loops.update({called} if how == "body" else ())
        match = _COLLECTIVE.search(line)
        if match:
            arrays = re.findall(r"([a-z]+\d+)\[([\d,]*)\]", match[2])
            if match[3] == "all-gather" and match[4]:  # (operands, results)
                arrays = arrays[len(arrays) // 2 :]
            found += [(here, match[3], kind, shape) for kind, shape in arrays if shape]
    inside = _reachable(loops, calls)
    return [
        Collective(kind, dtype, prod(map(int, shape.split(","))), where in inside)
        for where, kind, dtype, shape in found
    ]


def elements(found: list[Collective]) -> Counter[tuple[str, bool]]:
    """The number of elements of all collectives by kind and by whether they are in a loop."""
    sums: Counter[tuple[str, bool]] = Counter()
    for each in found:
        sums[each.kind, each.in_loop] += each.size
    return sums


def _reachable(start: set[str], calls: dict[str, set[str]]) -> set[str]:
    seen, new = set(start), set(start)
    while new:
        new = set().union(*(calls.get(name, set()) for name in new)) - seen
        seen |= new
    return seen
