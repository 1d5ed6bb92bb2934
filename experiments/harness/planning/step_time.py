"""The time of a step on a TPU, from its compiler's cycles and a model of what these leave out.

The compiler estimates the cycles of each kernel that it makes itself. It estimates none for Mosaic
kernels (flash attention), collectives and sorts, of which sorts are not counted:

- Attention takes the time of its FLOPs at the peak of the matrix units, which is a lower bound.
- A collective sends its bytes around a ring at the rate of one axis of the chip's links.
  Asynchronous ones run while kernels compute, and count only where they take longer than these.
- What goes to other slices takes a chip's share of the network, and nothing runs at the same time.

No figure of this model has been compared with a TPU. Waiting for memory is not in it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.harness.planning import counting
from experiments.harness.planning.hlo import Instruction, Program
from experiments.harness.planning.targets import TPUS
from experiments.harness.training.chips import ACCELERATORS
from jaxformer.ops.attention import AttentionSpec

_BACKWARD = 2.5
"""Products of the backward pass of flash attention over the two of its forward pass: five."""


class StepTime(NamedTuple):
    """Seconds of a step: of the compiler's kernels, and modelled ones of all else.

    `cycles` sums the compiler's kernels. `between_slices` is the time of the network.
    """

    cycles: int
    kernels: float
    attention: float
    collectives: float
    asynchronous: float
    between_slices: float

    @property
    def total(self) -> float:
        """The seconds of all; asynchronous collectives hide behind the kernels."""
        computed = self.kernels + self.attention
        return max(computed, self.asynchronous) + self.collectives + self.between_slices


def step_time(program: Program, accelerator: str, specs: Sequence[AttentionSpec]) -> StepTime:
    """The time of a step; `specs` are the attention calls of the model."""
    core, figures = TPUS[accelerator], ACCELERATORS[accelerator]
    cycles, attention = 0, 0.0
    for times, _, _, each in program.executed:
        cycles += times * each.cycles
        if each.target == "tpu_custom_call":
            attention += times * attention_flops(each, specs)
    waits = {True: 0.0, False: 0.0}
    for collective in counting.collectives(program):
        waits[collective.asynchronous] += collective.sent / core.link
    return StepTime(
        cycles=cycles,
        kernels=cycles / core.clock,
        attention=attention / figures.bfloat16,
        collectives=waits[False],
        asynchronous=waits[True],
        between_slices=counting.between_slices(program) / core.network,
    )


def attention_flops(kernel: Instruction, specs: Sequence[AttentionSpec]) -> float:
    """FLOPs of a Mosaic kernel of attention on a device; 0 for a kernel without `specs`.

    The result, or the gradient of the queries, has an element for each query, head and feature;
    each takes part in two products with the keys that the query may see.
    """
    if not specs or not kernel.shapes:
        return 0.0
    elements = max(math.prod(shape.sizes) for shape in kernel.shapes)
    sizes = {size for shape in kernel.shapes for size in shape.sizes}
    spec = next((spec for spec in specs if spec.queries in sizes), specs[0])
    backward = _BACKWARD if "transpose(" in kernel.op_name else 1.0
    return backward * 4.0 * elements * seen_keys(spec)


def seen_keys(spec: AttentionSpec) -> float:
    """The mean number of keys that a query sees by the mask's positions."""
    last = np.arange(spec.queries) + 1 if spec.causal else np.full(spec.queries, spec.keys)
    return float(np.minimum(last, spec.window or spec.keys).mean())
