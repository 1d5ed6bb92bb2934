"""What the compiled program of a cell does, as numbers that a file keeps."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax

from experiments.harness.planning.collectives import collectives, dearest_collectives
from experiments.harness.planning.hlo import Program
from experiments.harness.planning.largest_arrays import largest_arrays
from experiments.harness.planning.work import work
from tests.compilers.step_bytes import step_cost


@dataclass
class Counts:
    """One device's share of a program.

    Attributes:
      sent: bytes that it sends, around a ring; of a choice in a search the most.
      flops: of matrix products outside of kernels; 0 for a search, of which each choice counts.
      live: bytes of its arguments and temporaries in memory. Caches that a TPU's compiler keeps on
        the chip for the whole program, up to 67 MB of a beam search's, are not among them.
      temporary: bytes of its temporaries.
      read: bytes that a token of a search reads and writes; 0 for a loss.
      collectives: what is sent, as (kind, type, bytes of one, times, devices, in a loop).
      arrays: the largest arrays, as (bytes, shape, number).
    """

    sent: float
    flops: float
    live: int
    temporary: int
    read: float
    collectives: list[Any]
    arrays: list[Any]


def count(compiled: jax.stages.Compiled, is_search: bool) -> Counts:
    """The numbers of a `compiled` program; of a search those of a token."""
    program = Program(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    if is_search:
        found = [each for each in dearest_collectives(program) if each.in_loop]
    else:
        found = collectives(program)
    times: Counter[Any] = Counter()
    for each in found:
        times[each.kind, each.dtype, each.bytes, each.devices, each.in_loop] += each.times
    return Counts(
        sent=sum(each.sent for each in found),
        flops=0.0 if is_search else work(program).flops,
        live=memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        read=step_cost(program).bytes if is_search else 0.0,
        collectives=[[*key, number] for key, number in times.most_common()],
        arrays=[list(each) for each in largest_arrays(program, 8)],
    )
