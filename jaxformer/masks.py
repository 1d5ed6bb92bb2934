"""Who may attend to whom, kept as facts and made a matrix only on demand."""

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Mask:
    """Facts about which of S keys each of T queries may attend to; absent facts allow all.

    `causal`: query t sees no key after position `offset` + t. `offset`: where query 0 stands
    among the keys (with a cache: how many tokens came before), a number or an int32 scalar.
    `key_valid` [B, S]: False for padding. `query_segments` [B, T] and `key_segments` [B, S]:
    only equal segments see each other. `window`: with `causal`, only the last `window` keys.
    `pairs` [B, T, S]: what no other fact can say, True where a query may see a key.

        causal, T=3, S=3   causal, offset=2, T=2, S=4   key_valid=[1 1 0]   segments 1 1 2
            1 0 0                  1 1 1 0                   1 1 0               1 1 0
            1 1 0                  1 1 1 1                   1 1 0               1 1 0
            1 1 1                                            1 1 0               0 0 1
    """

    causal: bool = struct.field(pytree_node=False, default=False)
    window: int | None = struct.field(pytree_node=False, default=None)
    offset: jax.Array | int = 0
    key_valid: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    pairs: jax.Array | None = None

    def part(self, query: jax.Array | int, queries: int, key: jax.Array | int, keys: int) -> "Mask":
        """The mask between the queries from `query` on and the keys from `key` on.

        `part(t, T, s, S).dense(T, S)` is the block [.., t:t+T, s:s+S] of the whole matrix. `query`
        and `key` are numbers or int32 scalars; the block must lie inside the facts.
        """

        def cut(fact: jax.Array | None, first: jax.Array | int, size: int) -> jax.Array | None:
            return None if fact is None else jax.lax.dynamic_slice_in_dim(fact, first, size, 1)

        pairs = cut(self.pairs, query, queries)
        if pairs is not None:
            pairs = jax.lax.dynamic_slice_in_dim(pairs, key, keys, 2)

        return self.replace(
            offset=self.offset + query - key,
            key_valid=cut(self.key_valid, key, keys),
            query_segments=cut(self.query_segments, query, queries),
            key_segments=cut(self.key_segments, key, keys),
            pairs=pairs,
        )

    def dense(self, queries: int, keys: int) -> jax.Array | None:
        """The matrix [B or 1, 1, T, S] bool (True = may attend), or None when all may.

        Raises `ValueError` for a window without a direction.
        """
        if self.window is not None and not self.causal:
            raise ValueError(
                f"window={self.window} counts keys backwards from the query, so it needs "
                "causal=True, but causal=False was given"
            )
        parts = []
        if self.causal:
            distance = self.offset + jnp.arange(queries)[:, None] - jnp.arange(keys)[None, :]
            seen = distance >= 0
            if self.window is not None:
                seen &= distance < self.window
            parts.append(seen[None, None])
        if self.key_valid is not None:
            parts.append(self.key_valid[:, None, None, :])
        if self.query_segments is not None:
            same = self.query_segments[:, :, None] == self.key_segments[:, None, :]
            parts.append(same[:, None])
        if self.pairs is not None:
            parts.append(self.pairs[:, None])
        if not parts:
            return None
        allowed = parts[0]
        for part in parts[1:]:
            allowed = allowed & part
        return allowed
