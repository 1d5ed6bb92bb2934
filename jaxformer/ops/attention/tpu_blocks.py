"""Blocks of queries and keys that `tpu_flash` computes, and the ones that a causal mask hides."""

from typing import Any, NamedTuple

import jax.numpy as jnp

LANES = 128


class Plan(NamedTuple):
    """Static arguments; T, S, N and H are those of one device."""

    queries: int
    keys: int
    heads: int
    head_dim: int
    block_q: int
    block_k: int
    causal: bool
    offset: int
    scale: float
    dropout: float
    interpret: bool

    @property
    def width(self) -> int:
        """The lanes of a block."""
        return max(self.head_dim, LANES)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The numbers of groups of heads, of blocks of queries and of blocks of keys."""
        groups = self.heads * self.head_dim // self.width
        return groups, self.queries // self.block_q, self.keys // self.block_k

    def sees(self, i: Any, j: Any) -> Any:
        """Whether a query of block `i` may see a key of block `j`, by their positions."""
        last = self.offset + (i + 1) * self.block_q - 1
        return j * self.block_k <= last if self.causal else True

    def last_key_block(self, i: Any) -> Any:
        """The last block of keys that block `i` of queries sees; 0 if it sees none."""
        last = self.grid[2] - 1
        if not self.causal:
            return last
        return jnp.clip((self.offset + (i + 1) * self.block_q - 1) // self.block_k, 0, last)

    def first_query_block(self, j: Any) -> Any:
        """The first block of queries that sees block `j` of keys, or the last block."""
        if not self.causal:
            return 0
        return jnp.clip((j * self.block_k - self.offset) // self.block_q, 0, self.grid[1] - 1)
