"""The time of a step on a TPU, from its compiler's cycles and a model of what these leave out.

The compiler estimates the cycles of each kernel that it makes itself. It estimates none for Mosaic
kernels (flash attention, products with experts), collectives and sorts, of which sorts are not
counted:

- Attention takes the cycles of its kernels' schedules, where libtpu writes them, else the time of
  its FLOPs at the peak of the matrix units, which is a lower bound.
- Products with experts take the time of their FLOPs at the peak, as if a device computed each
  choice of its tokens; along "tensor" it computes a part of them.
- A collective sends its bytes around a ring at the rate of one axis of the chip's links.
  Asynchronous ones run while kernels compute, and count only where they take longer than these.
- What goes to other slices takes a chip's share of the network, and nothing runs at the same time.

No figure of this model has been compared with a TPU. Waiting for memory is not in it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from experiments.harness.planning.collectives import between_slices, collectives
from experiments.harness.planning.flash_kernels import MOSAIC, FlashKernel, seen_pairs
from experiments.harness.planning.hlo import Instruction, Program
from experiments.harness.planning.schedules import Schedule
from experiments.harness.planning.targets import TPUS
from experiments.harness.training.chips import ACCELERATORS
from jaxformer.ops.attention import AttentionSpec


class StepTime(NamedTuple):
    """Seconds of a step: of the compiler's kernels, and modelled ones of all else.

    Attributes:
      cycles: the sum of the compiler's kernels.
      kernels: the seconds of these cycles.
      attention: the seconds of flash attention by its kernels' schedules.
      attention_bound: of kernels without a schedule, the seconds of their FLOPs at the peak.
      experts: the seconds of the products with experts at the peak.
      collectives: the seconds of collectives during which nothing is computed.
      asynchronous: the seconds of collectives that hide behind the kernels.
      between_slices: the seconds of the network.
    """

    cycles: int
    kernels: float
    attention: float
    attention_bound: float
    experts: float
    collectives: float
    asynchronous: float
    between_slices: float

    @property
    def total(self) -> float:
        """The seconds of all; asynchronous collectives hide behind the kernels."""
        computed = self.kernels + self.attention + self.attention_bound + self.experts
        return max(computed, self.asynchronous) + self.collectives + self.between_slices


def step_time(
    program: Program,
    accelerator: str,
    specs: Sequence[AttentionSpec],
    schedules: Mapping[str, Schedule] = MappingProxyType({}),
) -> StepTime:
    """The time of a step.

    `specs` are the attention calls of the model, `schedules` are by their instructions' names.
    """
    chip, figures = TPUS[accelerator], ACCELERATORS[accelerator]
    cycles, scheduled, flops, of_experts = 0, 0.0, 0.0, 0.0
    equal: dict[FlashKernel, Schedule] = {}  # the compiler schedules one of equal kernels
    for run in program.executed:
        each = run.instruction
        kernel = FlashKernel.read(program, run.computation, each, specs)
        if kernel is not None and each.name in schedules:
            equal[kernel] = schedules[each.name]
    for run in program.executed:
        each = run.instruction
        cycles += run.times * each.cycles
        if each.target != MOSAIC:
            continue
        if is_product_with_experts(each):
            of_experts += run.times * estimated_flops(each)
            continue
        kernel = FlashKernel.read(program, run.computation, each, specs)
        if kernel is None:
            flops += run.times * least_attention_flops(each, specs)
        elif schedule := schedules.get(each.name) or equal.get(kernel):
            scheduled += run.times * kernel.cycles(schedule)
        else:
            flops += run.times * kernel.flops
    waits = {True: 0.0, False: 0.0}
    for collective in collectives(program):
        waits[collective.asynchronous] += collective.sent / chip.link
    return StepTime(
        cycles=cycles,
        kernels=cycles / chip.clock,
        attention=scheduled / chip.clock,
        attention_bound=flops / figures.bfloat16,
        experts=of_experts / figures.bfloat16,
        collectives=waits[False],
        asynchronous=waits[True],
        between_slices=between_slices(program) / chip.network,
    )


def is_product_with_experts(kernel: Instruction) -> bool:
    """Whether a Mosaic kernel is one of JAX's `megablox`."""
    return re.search(r"\bt?gmm\b", kernel.op_name) is not None


def estimated_flops(kernel: Instruction) -> float:
    """The FLOPs of a Mosaic kernel by its own estimate; 0 without one."""
    estimate = re.search(r'"cost_estimate":\s*\{[^{}]*"flops":\s*"?(\d+)', kernel.text)
    return float(estimate[1]) if estimate else 0.0


def least_attention_flops(kernel: Instruction, specs: Sequence[AttentionSpec]) -> float:
    """The least FLOPs of an unknown Mosaic kernel of attention; 0 without `specs`.

    Its first result has an element for each query, head and feature. Each takes part in two
    products with the keys that the query may see.
    """
    if not specs or not kernel.shapes:
        return 0.0
    sizes = kernel.shapes[0].sizes
    spec = next((spec for spec in specs if spec.queries in sizes), specs[0])
    return 4.0 * math.prod(sizes) * seen_pairs(spec) / spec.queries
