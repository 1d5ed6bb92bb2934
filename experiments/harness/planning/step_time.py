"""The time of a step on a TPU, from its compiler's cycles and a model of what these leave out.

The compiler estimates the cycles of each kernel that it makes itself. It estimates none for Mosaic
kernels (flash attention), sorts and collectives:

- A Mosaic attention kernel computes the blocks of scores that its mask does not hide. Its products
  (2 forward; 3 for the queries' gradient; 4 for that of keys and values; 5 where one kernel
  computes all three, as that of `tpu_flash` does) take their FLOPs, with the head size padded to
  the matrix unit's lanes, at `KERNEL_UTILIZATION` of the peak.
- A sort of n values reads and writes its arrays log2(n) times.
- A collective sends its bytes around a ring at the rate of one axis of the chip's links.
  Asynchronous ones run beside the kernels and count only where they take longer than these.

No figure of this model has been compared with a TPU.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from experiments.harness.planning import counting
from experiments.harness.planning.hlo import Instruction, Program
from experiments.harness.planning.targets import TPUS
from experiments.harness.training.utilization import ACCELERATORS
from jaxformer.ops.attention import AttentionSpec

KERNEL_UTILIZATION = 0.5
"""The share of the matrix units' peak that an attention kernel reaches: an assumption."""

_PRODUCTS = (("fwd", 2), ("bwd", 5), ("dq", 3), ("dkv", 4))
_LONGEST_BLOCK = 512  # of a kernel whose text does not say its own


class StepTime(NamedTuple):
    """Seconds of a step: of the compiler's kernels, and modelled ones of all else.

    `cycles` are those of the compiler's kernels.
    """

    cycles: int

    kernels: float
    attention: float
    sorts: float
    collectives: float
    asynchronous: float

    @property
    def total(self) -> float:
        """The seconds of all; asynchronous collectives hide behind the kernels."""
        computed = self.kernels + self.attention + self.sorts
        return max(computed, self.asynchronous) + self.collectives


def step_time(program: Program, accelerator: str, specs: Sequence[AttentionSpec]) -> StepTime:
    """The time of a step; `specs` are the attention calls of the model."""
    core, figures = TPUS[accelerator], ACCELERATORS[accelerator]
    cycles = 0
    attention = sort = 0.0
    for times, _, computation, each in program.executed:
        cycles += times * each.cycles
        if each.target == "tpu_custom_call":
            flops = _attention_flops(program, computation, each, specs, core.lanes)
            attention += times * flops / (figures.bfloat16 * KERNEL_UTILIZATION)
        elif each.opcode == "sort":
            moved = 2 * sum(shape.padded_bytes for shape in each.shapes)
            passes = math.log2(max(max(each.shapes[0].sizes, default=2), 2))
            sort += times * moved * passes / figures.bandwidth
    waits = {True: 0.0, False: 0.0}
    for collective in counting.collectives(program):
        waits[collective.asynchronous] += collective.sent / core.link
    return StepTime(cycles, cycles / core.clock, attention, sort, waits[False], waits[True])


def _attention_flops(
    program: Program,
    computation: str,
    kernel: Instruction,
    specs: Sequence[AttentionSpec],
    lanes: int,
) -> float:
    """FLOPs of an attention kernel; 0 for another kernel.

    q and k are [..., N, T, H] and [..., S, H], or [B, T, N * H] and [B, S, N * H] in `tpu_flash`.
    """
    products = next((n for word, n in _PRODUCTS if f"_{word}" in kernel.op_name), 0)
    large = [s for s in program.operand_shapes(computation, kernel) if _is_array(s.dtype, s.sizes)]
    if products == 0 or len(large) < 3:
        return 0.0
    q, k, v = large[:3]
    if products == 4 and len(kernel.shapes) > 2 and 'use_fused_bwd_kernel\\": true' in kernel.text:
        products = 5
    queries, keys = q.sizes[-2], k.sizes[-2]
    spec = next((s for s in specs if (s.queries, s.keys) == (queries, keys)), None)
    block = _block(kernel.text)
    pairs = visited_pairs(queries, keys, block, spec)
    rows, sizes = math.prod(q.sizes[:-2]), (q.sizes[-1], v.sizes[-1])
    if "tpu_flash" in kernel.op_name and spec is not None:
        rows *= q.sizes[-1] // spec.key_size
        sizes = spec.key_size, spec.value_size
    width = sum(_padded(size, lanes) for size in sizes) / 2
    return 2.0 * products * rows * pairs * width


def visited_pairs(queries: int, keys: int, block: int, spec: AttentionSpec | None) -> int:
    """(query, key) pairs in the blocks that a mask by position does not hide as a whole."""
    size_t, size_s = min(block, queries), min(block, keys)
    if spec is None or (not spec.causal and spec.window is None):
        return queries * keys
    offset = spec.offset or 0
    count = 0
    for first in range(0, queries, size_t):
        last_key = first + size_t - 1 + offset if spec.causal else keys - 1
        first_key = max(first + offset - spec.window + 1, 0) if spec.window else 0
        count += max(min(last_key, keys - 1) // size_s - first_key // size_s + 1, 0)
    return count * size_t * size_s


def _is_array(dtype: str, sizes: tuple[int, ...]) -> bool:
    return dtype in ("bf16", "f32") and len(sizes) >= 3


def _padded(size: int, lanes: int) -> int:
    return -(-size // lanes) * lanes


def _block(text: str) -> int:
    """The number of queries in a block of an attention kernel."""
    match = re.search(r"block_q\W+(\d+)", text)
    return int(match[1]) if match else _LONGEST_BLOCK
