"""`AttentionMask`: which keys each query may attend to, stored as attributes."""

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool

from jaxformer.errors import ConfigError

AnyArray = Array | np.ndarray

MASKED_LOGIT = -1e30
"""The logit of a key that a query may not attend to.

It is finite, so that a query without keys stays finite in the forward and the backward pass.
"""

_ARRAYS = ("padding_mask", "query_segments", "key_segments", "explicit")


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class AttentionMask:
    """The keys, of S, that each of T queries may attend to; each attribute is one constraint.

    It stores attributes and builds the [T, S] matrix only when an attention function asks for it.
    A key is seen where all attributes allow it; None imposes no constraint.

    `causal`: query t sees no key after position `offset` + t. `offset`: the position of query 0
    among the keys (with a cache: the number of tokens before it), a number, an int32 scalar or one
    of each example [B]; a Python int stays known while tracing. `window`: with `causal`, only the
    last `window` keys. `padding_mask` [B, S]: True at real tokens. `query_segments` [B, T] and
    `key_segments` [B, S]: a query sees only keys of its own segment. `explicit` [B, T, S]: True
    where a query may see a key, for whatever the other attributes cannot express.
    `from_cache` is set while decoding: a kernel that does not support the call then leaves it to
    `reference`. Keys that all queries see are put first by `with_first_keys`.

        causal, T=3, S=3   causal, offset=2, T=2, S=4   padding_mask=[1 1 0]   segments 1 1 2
            1 0 0                  1 1 1 0                   1 1 0                  1 1 0
            1 1 0                  1 1 1 1                   1 1 0                  1 1 0
            1 1 1                                            1 1 0                  0 0 1

    Masks are bool. Flax's layouts are taken too: [B, 1, 1, S] and [B, 1, S] of `padding_mask`,
    [B, 1, T, S] of `explicit`.

    Raises `ConfigError` for a mask of another type or shape, segments of queries or keys alone, a
    window below 1 or not a Python int, and a window without `causal`.

    >>> first_two = jnp.array([[True, True, False]])
    >>> mask = jf.AttentionMask(causal=True, padding_mask=first_two)
    >>> mask.materialize(3, 3)[0, 0].astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 0]], dtype=int32)
    """

    causal: bool = False
    window: int | None = None
    offset: jax.Array | int = 0
    padding_mask: AnyArray | None = None
    query_segments: AnyArray | None = None
    key_segments: AnyArray | None = None
    explicit: AnyArray | None = None
    from_cache: bool = False

    def __post_init__(self) -> None:
        if (self.query_segments is None) != (self.key_segments is None):
            names = ["query_segments", "key_segments"]
            present, missing = names if self.key_segments is None else reversed(names)
            raise ConfigError(f"{present} was given without {missing}: give both or neither")
        window = self.window
        if window is not None and (type(window) is not int or window < 1 or not self.causal):
            raise ConfigError(
                f"window={window!r} and causal={self.causal}: give a Python int of at least 1 with "
                "causal=True, because a window counts keys backwards from the query"
            )
        if self.padding_mask is not None:
            object.__setattr__(self, "padding_mask", as_padding_mask(self.padding_mask))
        if self.explicit is not None:
            object.__setattr__(self, "explicit", _as_explicit(self.explicit))

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[bool, int | None, int | None, bool]]:
        """The arrays, and what is known while tracing."""
        static = self.offset if isinstance(self.offset, int) else None
        offset = self.offset if static is None else None
        arrays = offset, self.padding_mask, self.query_segments, self.key_segments, self.explicit
        return arrays, (self.causal, self.window, static, self.from_cache)

    @classmethod
    def tree_unflatten(
        cls, static: tuple[bool, int | None, int | None, bool], arrays: Any
    ) -> "AttentionMask":
        """The mask that was flattened."""
        causal, window, offset, from_cache = static
        mask = object.__new__(cls)  # JAX also makes masks of what is no array
        values = dict(zip(_ARRAYS, arrays[1:], strict=True)) | {"causal": causal, "window": window}
        values |= {"offset": arrays[0] if offset is None else offset, "from_cache": from_cache}
        for name, value in values.items():
            object.__setattr__(mask, name, value)
        return mask

    def slice(
        self, query: Array | int, queries: int, key: Array | int, keys: int
    ) -> "AttentionMask":
        """The mask between `queries` queries from `query` on and `keys` keys from `key` on.

        `slice(t, T, s, S).materialize(T, S)` is the block [.., t:t+T, s:s+S] of the whole matrix.
        `query` and `key` are numbers or int32 scalars; the block must lie inside the arrays.
        """

        def cut(x: AnyArray | None, start: Array | int, size: int, axis: int = 1):
            if x is None or x.shape[axis] == 1:  # one row for all queries
                return x
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

        return replace(
            self,
            offset=self.offset + query - key,
            padding_mask=cut(self.padding_mask, key, keys),
            query_segments=cut(self.query_segments, query, queries),
            key_segments=cut(self.key_segments, key, keys),
            explicit=cut(cut(self.explicit, query, queries), key, keys, 2),
        )

    def with_first_keys(self, count: int, queries: int, keys: int) -> "AttentionMask":
        """The mask of the keys with `count` more before them, which all queries see.

        Such keys are no tokens: the vectors of prefix tuning, a memory, an attention sink.
        `queries` and `keys` are the numbers T and S without them. A window and segments become
        `explicit`, since they exclude keys by their places and their documents. A bias needs
        `count` more columns before its own.

        >>> mask = jf.AttentionMask(causal=True, window=1).with_first_keys(2, queries=3, keys=3)
        >>> mask.materialize(3, 5)[0, 0].astype(int)
        Array([[1, 1, 1, 0, 0],
               [1, 1, 0, 1, 0],
               [1, 1, 0, 0, 1]], dtype=int32)
        """

        def pad(x: AnyArray | None) -> Array | None:
            if x is None:
                return None
            widths = [(0, 0)] * (x.ndim - 1) + [(count, 0)]
            return jnp.pad(x, widths, constant_values=True)

        if self.window is not None or self.query_segments is not None:
            dense: Any = self.materialize(queries, keys)
            return AttentionMask(explicit=pad(dense[:, 0]), from_cache=self.from_cache)
        offset = self.offset + count if self.causal else self.offset
        padding_mask, explicit = pad(self.padding_mask), pad(self.explicit)
        return replace(self, offset=offset, padding_mask=padding_mask, explicit=explicit)

    def materialize(self, queries: int, keys: int) -> Bool[Array, "#B 1 T S"] | None:
        """The matrix, True where a query may attend to a key; None where all may."""
        parts: list[Any] = []
        if self.causal:
            index = jnp.add.outer(self.offset, jnp.arange(queries))  # of each query among the keys
            distance = index.reshape(-1, queries, 1) - jnp.arange(keys)[None, None]
            seen = distance >= 0
            if self.window is not None:
                seen &= distance < self.window
            parts.append(seen[:, None])
        if self.padding_mask is not None:
            parts.append(self.padding_mask[:, None, None, :])
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[:, :, None] == self.key_segments[:, None, :]
            parts.append(same[:, None])
        if self.explicit is not None:
            parts.append(self.explicit[:, None])
        return reduce(jnp.logical_and, parts) if parts else None


def as_attention_mask(mask: AttentionMask | Bool[AnyArray, "B S"] | None) -> AttentionMask:
    """`mask`; an array is a padding mask, True at real keys, and None allows all."""
    return mask if isinstance(mask, AttentionMask) else AttentionMask(padding_mask=mask)


def as_padding_mask(mask: Any) -> Any:
    """`mask` as [B, S]; None stays None.

    Raises `ConfigError` for what is not bool or has not the shape [B, S], [B, 1, S] or
    [B, 1, 1, S].
    """
    if mask is None:
        return None
    _check_bool("padding_mask", mask)
    ones = mask.shape[1:-1]
    if not 2 <= mask.ndim <= 4 or any(size != 1 for size in ones):
        raise ConfigError(
            f"padding_mask has the shape {mask.shape}, but must be [B, S], True at the real keys"
        )
    return mask.reshape(mask.shape[0], mask.shape[-1]) if ones else mask


def _as_explicit(mask: Any) -> Any:
    _check_bool("explicit", mask)
    if mask.ndim == 4 and mask.shape[1] == 1:
        return mask[:, 0]
    if mask.ndim != 3:
        raise ConfigError(
            f"explicit has the shape {mask.shape}, but must be [B, T, S], True where a query of T "
            "may see a key of S"
        )
    return mask


def _check_bool(name: str, mask: Any) -> None:
    if not isinstance(mask, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ConfigError(f"{name} is a {type(mask).__name__}, but must be an array")
    if mask.dtype != bool:
        raise ConfigError(
            f"{name} is of {mask.dtype}, but must be bool, True where a query may see a key: give "
            "`mask > -1e4` for a mask that is added to the logits, `mask != 0` for numbers; "
            "PyTorch's bool masks, which are True where it may not, are `~mask`"
        )


def check_mask(mask: Any, sizes: tuple[int, int, int]) -> None:
    """Raises `ConfigError` for what is no `AttentionMask` of `sizes`: (B, T, S)."""
    if not isinstance(mask, AttentionMask):
        raise ConfigError(
            f"mask is a {type(mask).__name__}: give AttentionMask(padding_mask=array) with a bool "
            "array [B, S] that is True at real keys, or AttentionMask(explicit=array) with one "
            "[B, T, S] that is True where a query may see a key; AttentionMask() allows all"
        )
    examples, queries, keys = sizes
    for name, size in (
        ("padding_mask", (examples, keys)),
        ("query_segments", (examples, queries)),
        ("key_segments", (examples, keys)),
        ("explicit", (examples, queries, keys)),
    ):
        array: Any = getattr(mask, name)
        if array is None:
            continue
        shape = tuple(array.shape)
        is_broadcast = all(a in (1, b) for a, b in zip(shape, size, strict=False))
        if len(shape) != len(size) or shape[-1] != size[-1] or not is_broadcast:
            hint = ""
            if name == "padding_mask":
                hint = "; a matrix [T, S] is AttentionMask(explicit=matrix[None])"
            raise ConfigError(
                f"{name} has the shape {shape}, but must be {list(size)} for "
                f"{examples} examples of {queries} queries and {keys} keys{hint}"
            )
