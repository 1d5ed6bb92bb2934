"""Calls of `tpu_flash`'s kernels in a program: the blocks that they compute, FLOPs and cycles."""

import re
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from experiments.harness.planning.hlo import Instruction, Program
from experiments.harness.planning.schedules import Schedule
from jaxformer.ops.attention import AttentionSpec

MOSAIC = "tpu_custom_call"
"""The target of kernels that XLA does not see into."""

_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
_BACKWARD_RESULTS = 3


class Blocks(NamedTuple):
    """The blocks of a grid for one block of heads: rows are blocks of queries, columns of keys.

    Attributes:
      rows: the blocks of queries.
      steps: the steps of each, as many as the longest one has blocks of keys.
      whole: blocks in which each query sees each key by their positions.
      masked: the other blocks in which a query sees a key.
      fetched: how often another block of keys is fetched than in the step before.
    """

    rows: int
    steps: int
    whole: int
    masked: int
    fetched: int


class FlashKernel(NamedTuple):
    """A call of a kernel of `tpu_flash` on a device.

    `queries` and `keys` are padded lengths; a backward pass may take the keys in parts, which begin
    at `first_key`. Of the `query_groups` of heads, each as wide as `width` lanes, several may read
    one of the `key_groups`.
    """

    spec: AttentionSpec
    is_backward: bool
    batch: int
    queries: int
    keys: int
    query_groups: int
    key_groups: int
    width: int
    block_q: int
    block_k: int
    first_key: int

    @classmethod
    def read(
        cls, program: Program, computation: str, each: Instruction, specs: Sequence[AttentionSpec]
    ) -> "FlashKernel | None":
        """The call of an instruction of a program; None if it is no kernel of `tpu_flash`.

        `specs` are the attention calls of the model.
        """
        if each.target != MOSAIC:  # instructions that read its results have its facts too
            return None
        facts = dict(re.findall(r'"(\w+)":\s*"([^"]*)"', each.text))
        spec = next((spec for spec in specs if str(spec) == facts.get("call")), None)
        if spec is None:
            return None
        q, k = program.operand_shapes(computation, each)[:2]
        is_backward = len(each.shapes) == _BACKWARD_RESULTS
        # The logarithms of the queries' sums [B, G, 8, T]: a result forward, an operand backward.
        sums = program.operand_shapes(computation, each)[-2] if is_backward else each.shapes[1]
        width = q.sizes[2] // sums.sizes[1]
        return cls(
            spec=spec,
            is_backward=is_backward,
            batch=q.sizes[0],
            queries=q.sizes[1],
            keys=k.sizes[1],
            query_groups=sums.sizes[1],
            key_groups=k.sizes[2] // width,
            width=width,
            block_q=int(facts["block_q"]),
            block_k=int(facts["block_kv"]),
            first_key=int(facts["first_key"]),
        )

    @property
    def blocks(self) -> Blocks:
        """The blocks that each block of heads computes."""
        return _blocks(
            self.spec, self.queries, self.keys, self.block_q, self.block_k, self.first_key
        )

    @property
    def flops(self) -> float:
        """FLOPs of the products with the keys that each query sees by their positions."""
        products = _BACKWARD_PRODUCTS if self.is_backward else _FORWARD_PRODUCTS
        heads = self.batch * self.query_groups * self.width
        return 2.0 * products * heads * seen_pairs(self.spec, self.first_key, self.keys)

    def cycles(self, schedule: Schedule) -> float:
        """Cycles by a schedule of this kernel, without waiting for memory."""
        blocks, share = self.blocks, self.query_groups // self.key_groups
        row = blocks.rows * (blocks.steps * schedule.step + schedule.row)
        row += blocks.whole * schedule.block + blocks.masked * schedule.masked_block
        row += blocks.fetched * schedule.fetch
        written = self.keys // self.block_k * schedule.group_block
        group = share * row + schedule.group + written
        steps = self.batch * self.query_groups * blocks.rows * blocks.steps
        cores = max(round(steps / schedule.steps), 1)
        return self.batch * self.key_groups * group / cores


@cache
def _blocks(
    spec: AttentionSpec, queries: int, keys: int, block_q: int, block_k: int, first_key: int
) -> Blocks:
    rows, columns = queries // block_q, keys // block_k
    first_query = np.arange(rows)[:, None] * block_q + (spec.offset or 0)
    last_query = first_query + block_q - 1
    first = np.arange(columns)[None] * block_k + first_key
    last = first + block_k - 1
    seen = np.ones((rows, columns), bool)
    whole = np.broadcast_to(last < spec.keys, seen.shape)
    if spec.causal:
        seen, whole = seen & (first <= last_query), whole & (last <= first_query)
    if spec.window is not None:
        seen = seen & (last > first_query - spec.window)
        whole = whole & (first > last_query - spec.window)
    fetched = np.nonzero(seen)[1]
    return Blocks(
        rows=rows,
        steps=max(int(seen.sum(1).max()), 1),
        whole=int((seen & whole).sum()),
        masked=int((seen & ~whole).sum()),
        fetched=1 + int(np.count_nonzero(np.diff(fetched))),
    )


@cache
def seen_pairs(spec: AttentionSpec, first_key: int = 0, keys: int | None = None) -> int:
    """The pairs of a query and a key that it sees by their positions, of these keys."""
    end = spec.keys if keys is None else min(first_key + keys, spec.keys)
    query = np.arange(spec.queries) + (spec.offset or 0)
    last = np.minimum(query, end - 1) if spec.causal else np.full(spec.queries, end - 1)
    first = first_key if spec.window is None else np.maximum(query - spec.window + 1, first_key)
    return int(np.maximum(last - first + 1, 0).sum())
