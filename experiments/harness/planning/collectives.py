"""The communication of a compiled program, for one step on one device.

The body of a loop counts as often as the loop runs it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

from experiments.harness.planning.hlo import Executed, Program, group_size

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Collective(NamedTuple):
    """Communication of one kind among groups of `devices`, which a step does `times`.

    `bytes` is what one of them takes or returns on a device, whichever is more. An `asynchronous`
    one runs while kernels compute: between a start and an end, or in steps fused with them.
    """

    kind: str
    dtype: str
    bytes: int
    times: int
    devices: int
    asynchronous: bool
    in_loop: bool

    @property
    def sent(self) -> float:
        """Bytes that a device sends for all of them, around a ring."""
        share = 1.0 if self.kind == "collective-permute" else 1 - 1 / self.devices
        return self.bytes * self.times * share * (2 if self.kind == "all-reduce" else 1)


def collectives(program: Program) -> list[Collective]:
    """The collectives of a step, the ones that move most first.

    Each computation of a choice counts.
    """
    return _largest_first(collectives_by_computation(program).values())


def dearest_collectives(program: Program) -> list[Collective]:
    """`collectives`, where only the computation of a choice counts that sends most."""
    by_computation = collectives_by_computation(program)
    sent = {name: sum(each.sent for each in found) for name, found in by_computation.items()}
    _, run = _dearest_run(program, program.entry, sent)
    return _largest_first(found for name, found in by_computation.items() if name in run)


def collectives_by_computation(program: Program) -> dict[str, list[Collective]]:
    """The collectives of each computation that a step runs, with how often it runs them."""
    by_computation: dict[str, list[Collective]] = {}
    chains: set[tuple[str, ...]] = set()
    for run in program.executed:
        found = by_computation.setdefault(run.computation, [])
        for chain, each in _collectives_of(program, run):
            # A TPU's kernels that share the steps of one collective have one chain_id.
            key = (*run.loops, chain)
            if chain and key in chains:
                continue
            chains.add(key)
            found.append(each)
    return by_computation


def _largest_first(groups: Iterable[list[Collective]]) -> list[Collective]:
    found = [each for group in groups for each in group]
    return sorted(found, key=lambda each: -each.bytes * each.times)


def _dearest_run(
    program: Program, computation: str, sent: Mapping[str, float]
) -> tuple[float, set[str]]:
    """Bytes that a run of `computation` sends, and all computations that it runs.

    `sent` are the bytes of each one alone. It runs the computation of a choice that sends most.
    """
    total, run = sent.get(computation, 0.0), {computation}
    for each in program.computations.get(computation, ()):
        if each.opcode == "while":
            inner = [_dearest_run(program, each.loop_body, sent)]
        elif each.opcode == "call":
            inner = [_dearest_run(program, name, sent) for name in each.called]
        elif each.opcode == "conditional":
            choices = (_dearest_run(program, name, sent) for name in each.called)
            inner = [max(choices, key=itemgetter(0))]
        else:
            continue
        for more, names in inner:
            total += more
            run |= names
    return total, run


def between_slices(program: Program) -> int:
    """Bytes that a TPU sends to chips of other slices in a step, over the hosts' network."""
    return sum(
        run.times * run.instruction.shapes[0].bytes
        for run in program.executed
        if run.instruction.opcode == "send" and "is_host_transfer=true" in run.instruction.text
    )


def _collectives_of(program: Program, run: Executed) -> Iterator[tuple[str, Collective]]:
    """(chain_id of a fused one or "", collective); an end is left out, its start has named it."""
    outer = run.instruction
    for computation, each in program.done_by(run):
        kind = each.opcode.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        operands = program.operand_shapes(computation, each)
        taken, returned = (sum(shape.bytes for shape in part) for part in (operands, each.shapes))
        if each.opcode.endswith("-start") and len(each.shapes) > len(operands):
            returned -= taken  # such a start returns its operands too
        if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # each device keeps a slice of the sum
        chain = re.search(r'chain_id="(\d+)"', each.text) if outer.opcode == "fusion" else None
        yield (
            chain[1] if chain else "",
            Collective(
                kind=kind,
                dtype=" and ".join(sorted({shape.dtype for shape in operands})),
                bytes=max(taken, returned),
                times=run.times,
                devices=group_size(each.text) or program.devices,
                asynchronous=chain is not None or outer.opcode.endswith("-start"),
                in_loop=bool(run.loops),
            ),
        )
