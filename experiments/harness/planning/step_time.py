"""The time of a step on a TPU, from its compiler's cycles and a model of what these leave out.

The compiler estimates the cycles of each kernel that it makes itself. It estimates none for Mosaic
kernels (flash attention), sorts and collectives:

- A Mosaic kernel takes the cycles of its schedule (`kernel_cycles`) in each step of its grid. That
  of an attention kernel visits the blocks of scores that its mask by position does not hide.
- A sort of n values reads and writes its arrays log2(n) times.
- A collective sends its bytes around a ring at the rate of one axis of the chip's links.
  Asynchronous ones run beside the kernels and count only where they take longer than these.
- What goes to other slices takes a chip's share of the network, and nothing runs beside it.

No figure of this model has been compared with a TPU. Waiting for memory is not in it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from experiments.harness.planning import counting
from experiments.harness.planning.hlo import Instruction, Program
from experiments.harness.planning.kernel_cycles import Schedule, Schedules, kernel_key
from experiments.harness.planning.targets import TPUS
from experiments.harness.training.utilization import ACCELERATORS
from jaxformer.ops.attention import AttentionSpec, DeviceInfo
from jaxformer.ops.attention.tpu_flash import plan_of


class StepTime(NamedTuple):
    """Seconds of a step: of the compiler's kernels, and modelled ones of all else.

    `cycles` are those of the compiler's kernels. `between_slices` is the time of the network.
    `uncounted` are Mosaic kernels without a schedule, whose time is missing.
    """

    cycles: int

    kernels: float
    attention: float
    sorts: float
    collectives: float
    asynchronous: float
    between_slices: float
    uncounted: tuple[str, ...]

    @property
    def total(self) -> float:
        """The seconds of all; asynchronous collectives hide behind the kernels."""
        computed = self.kernels + self.attention + self.sorts
        return max(computed, self.asynchronous) + self.collectives + self.between_slices


def step_time(
    program: Program, accelerator: str, specs: Sequence[AttentionSpec], schedules: Schedules
) -> StepTime:
    """The time of a step; `specs` are the attention calls of the model."""
    core, figures = TPUS[accelerator], ACCELERATORS[accelerator]
    cycles, attention, sort = 0, 0.0, 0.0
    uncounted = []
    for times, _, computation, each in program.executed:
        cycles += times * each.cycles
        if each.target == "tpu_custom_call":
            schedule = _schedule(program, computation, each, schedules)
            if schedule is None:
                uncounted.append(each.name)
            else:
                attention += times * schedule.cycles(visited_blocks(schedule, specs))
        elif each.opcode == "sort":
            moved = 2 * sum(shape.padded_bytes for shape in each.shapes)
            passes = math.log2(max(max(each.shapes[0].sizes, default=2), 2))
            sort += times * moved * passes / figures.bandwidth
    waits = {True: 0.0, False: 0.0}
    for collective in counting.collectives(program):
        waits[collective.asynchronous] += collective.sent / core.link
    return StepTime(
        cycles=cycles,
        kernels=cycles / core.clock,
        attention=attention / core.clock,
        sorts=sort,
        collectives=waits[False],
        asynchronous=waits[True],
        between_slices=counting.between_slices(program) / core.network,
        uncounted=tuple(uncounted),
    )


def _schedule(
    program: Program, computation: str, kernel: Instruction, schedules: Schedules
) -> Schedule | None:
    inputs = tuple(map(str, program.operand_shapes(computation, kernel)))
    return schedules.get(kernel_key(kernel.name, inputs))


def visited_blocks(schedule: Schedule, specs: Sequence[AttentionSpec]) -> list[tuple[int, int]]:
    """(whole, cut): the blocks of keys that each block of queries sees as a whole, and in part.

    They are those of a mask by position. [(1, 0)] for a kernel that is no attention of `specs`:
    each of its steps visits a block.
    """
    (queries, block_q), (keys, block_k) = (*schedule.windows, (0, 1), (0, 1))[:2]
    padded = ((s, _padded(s.queries, block_q), _padded(s.keys, block_k)) for s in specs)
    spec = next((s for s, *lengths in padded if lengths == [queries, keys]), None)
    if spec is None:
        return [(1, 0)]
    plan = plan_of(spec, DeviceInfo("tpu"), scale=1.0)
    plan = plan._replace(queries=queries, keys=keys, block_q=block_q, block_k=block_k)
    rows = []
    for i in range(queries // block_q):
        seen = [plan.key_block(i, step) for step in range(plan.grid[3]) if plan.sees(i, step)]
        whole = sum(plan.all_seen(i, j) for j in seen)
        rows.append((whole, len(seen) - whole))
    return rows if any(map(sum, rows)) else [(1, 0)]


def _padded(length: int, block: int) -> int:
    return -(-length // block) * block
