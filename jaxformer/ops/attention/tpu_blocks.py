"""The work of `tpu_flash` in one step of its grid, and the memory that a step needs."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxformer.ops.attention.kernel import AttentionSpec
from jaxformer.ops.tpu_tiles import LANES

SUBLANES = 8


def chip_memory(kind: str) -> int:
    """The bytes of vector memory of a core of a TPU, an eighth of them left to the compiler."""
    known = {"v5 lite": 128, "v5e": 128, "v6": 128, "v5": 64, "v7": 64, "7x": 64}
    megabytes = next((size for name, size in known.items() if name in kind), 16)
    return megabytes * 2**20 * 7 // 8


class Tiling(NamedTuple):
    """Static arguments; T, S, N and K are sizes on one device, T and S multiples of the blocks.

    `spec` has the numbers of the whole call: keys from `spec.keys` on are padding. `memory` is what
    the kernels may use on the chip, in bytes. `first_key` is the position of the first key: a long
    backward pass takes the keys in parts.
    """

    spec: AttentionSpec
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    block_q: int
    block_k: int
    scale: float
    interpret: bool
    memory: int
    first_key: int = 0

    @property
    def offset(self) -> int:
        """The position of query 0 among the keys."""
        return self.spec.offset or 0

    @property
    def width(self) -> int:
        """The lanes of a block."""
        return max(self.head_dim, LANES)

    @property
    def packed(self) -> int:
        """The heads in the lanes of a block."""
        return self.width // self.head_dim

    @property
    def key_groups(self) -> int:
        """The number of blocks of lanes of the keys."""
        return -(-self.kv_heads // self.packed)

    @property
    def share(self) -> int:
        """The number of blocks of lanes of the queries that read one of the keys."""
        return min(self.heads // self.kv_heads, -(-self.heads // self.packed))

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """The key groups, the query groups of each, the blocks of queries, the steps of each."""
        blocks = self.queries // self.block_q
        steps = (self._last(i) - self._first(i) + 1 for i in range(blocks))
        return self.key_groups, self.share, blocks, max(1, *steps)

    def needed_memory(self, itemsize: int) -> int:
        """An upper bound of the memory on the chip of a step of the backward pass, in bytes."""
        row, scores = self.block_q * 4, self.block_q * self.block_k * 4
        queries, keys = self.width * self.block_q, self.width * self.block_k
        # q, out and their gradients, k, v, the rows of sums, words and segments, all fetched ahead
        fetched = 4 * queries * itemsize + 2 * keys * itemsize + 32 * row + 4 * self.block_k * LANES
        written = 2 * self.width * self.keys * (4 + 2 * itemsize)  # gradients of keys and values
        scratch = queries * (2 * self.packed * itemsize + 4) + keys * itemsize + 8 * row
        return 2 * fetched + written + scratch + 8 * scores

    def _first(self, i: Any) -> Any:
        """The first block of keys that block `i` of queries sees."""
        if self.spec.window is None:
            return 0
        first = self.offset - self.first_key + i * self.block_q - self.spec.window + 1
        return _most(first // self.block_k, 0)

    def _last(self, i: Any) -> Any:
        """The last block of keys that block `i` sees; before the first if it sees none."""
        last = self.keys // self.block_k - 1
        if not self.spec.causal:
            return last
        seen = self.offset - self.first_key + (i + 1) * self.block_q - 1
        return _least(seen // self.block_k, last)

    def key_block(self, i: Any, step: Any) -> Any:
        """The block of keys that a step fetches: the same one again where it computes nothing."""
        block = _least(self._first(i) + step, self._last(i))
        return _least(_most(block, 0), self.keys // self.block_k - 1)

    def sees(self, i: Any, step: Any) -> Any:
        """Whether a query of block `i` may see a key in this step, by their positions."""
        return self._first(i) + step <= self._last(i)

    def all_seen(self, i: Any, j: Any) -> Any:
        """Whether each query of block `i` may see each key of block `j`, by their positions."""
        first, last = (self.first_key + n * self.block_k for n in (j, j + 1))
        seen = last <= self.spec.keys
        if self.spec.causal:
            seen &= last - 1 <= self.offset + i * self.block_q
        if self.spec.window is not None:
            seen &= self.offset + (i + 1) * self.block_q - 1 - first < self.spec.window
        return seen


def _least(a: Any, b: Any) -> Any:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _most(a: Any, b: Any) -> Any:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)
