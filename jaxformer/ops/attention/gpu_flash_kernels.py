"""The kernels of `gpu_flash`, written in Pallas for Triton: blocks of one head of one example.

A kernel takes one long block of queries and visits short blocks of keys, or the reverse. It
computes the weights of each pair of blocks and does not store them.
"""

from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxformer.ops.dropout import keep_columns
from jaxformer.ops.masks import MASKED_LOGIT

_WARPS = 8  # of 32 threads each, for one block
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Plan:
    """Static arguments. `queries` and `keys` are the lengths padded to whole blocks."""

    queries: int
    keys: int
    group: int  # N // K, the heads that share one key/value head
    scale: float
    causal: bool
    window: int | None
    rate: float
    long: tuple[int, int]  # the size of a long block of queries, and of keys
    short: tuple[int, int]  # that of short ones
    interpret: bool


class MaskArrays(NamedTuple):
    """Traced arguments. T and S are padded to whole blocks."""

    offset: Any  # [1] int32
    query_segments: Any  # [B, T] int32 or None
    key_segments: Any  # [B, S] int32 or None
    explicit: Any  # [B, T, S] int8 or None


class Inputs(NamedTuple):
    """The inputs of a kernel: arrays of all examples, and in a kernel references to a part of them.

    A kernel sees the shapes on the right: one example, one key/value head, and G query heads: one,
    or all that share the key/value head.
    """

    bounds: Any  # [B, blocks, 2], [2]: the first short block to visit, the one after the last
    q: Any  # [B, T, N, H], [T, G, H]
    k: Any  # [B, S, K, H], [S, H]
    v: Any  # [B, S, K, Hv], [S, Hv]
    arrays: MaskArrays  # in a kernel [1], [T], [S], [T, S]
    words: Any  # [2, B, N, T], [2, G, T]: of `DropoutRng.row_words`; None without dropout
    d_out: Any = None  # [B, T, N, Hv], [T, G, Hv]: the gradient of the result
    log_sum: Any = None  # [B, N, T], [G, T]: the logarithm to base 2 of each row's sum
    inner: Any = None  # [B, N, T], [G, T]: the inner products of the result and its gradient

    def specs(self, plan: Plan, heads: int) -> "Inputs":
        """The part of each input at grid position (block, example, head / G); G is `heads`."""

        def kv_head(head: Any) -> Any:
            return head if heads == plan.group else jax.lax.div(head, np.int32(plan.group))

        def spec(x: Any, shape: tuple[int | None, ...], at: Any) -> Any:
            return None if x is None else pl.BlockSpec(shape, at)

        queries, keys, arrays = plan.queries, plan.keys, self.arrays
        of_head = partial(spec, shape=(None, heads, queries), at=lambda i, b, n: (b, n, 0))

        def of_queries(x: Any) -> Any:
            size = 0 if x is None else x.shape[3]
            return spec(x, (None, queries, heads, size), lambda i, b, n: (b, 0, n, 0))

        def of_keys(x: Any) -> Any:
            shape = None, keys, None, x.shape[3]
            return spec(x, shape, lambda i, b, n: (b, 0, kv_head(n), 0))

        return Inputs(
            bounds=spec(self.bounds, (None, None, 2), lambda i, b, n: (b, i, 0)),
            q=of_queries(self.q),
            k=of_keys(self.k),
            v=of_keys(self.v),
            arrays=MaskArrays(
                offset=pl.BlockSpec((1,), lambda i, b, n: (0,)),
                query_segments=spec(arrays.query_segments, (None, queries), lambda i, b, n: (b, 0)),
                key_segments=spec(arrays.key_segments, (None, keys), lambda i, b, n: (b, 0)),
                explicit=spec(arrays.explicit, (None, queries, keys), lambda i, b, n: (b, 0, 0)),
            ),
            words=spec(self.words, (2, None, heads, queries), lambda i, b, n: (0, b, n, 0)),
            d_out=of_queries(self.d_out),
            log_sum=of_head(self.log_sum),
            inner=of_head(self.inner),
        )


class Span(NamedTuple):
    """`size` queries or keys from `start` on, a number known only while running."""

    start: Any
    size: int

    @property
    def slice(self) -> Any:
        return pl.ds(self.start, self.size)

    @property
    def indices(self) -> Array:
        return self.start + jnp.arange(self.size, dtype=jnp.int32)


def _dot(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """The product of two matrices over these axes, in float32."""
    dims = ((axes[:1], axes[1:]), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _logits(plan: Plan, arrays: MaskArrays, q: Array, k: Array, rows: Span, columns: Span):
    """Scaled logits [t, s] to base 2, and which of them are allowed (None: all)."""
    logits = _dot(q, k, (1, 1)) * (plan.scale * _LOG2_E)
    parts = []
    if plan.causal:
        distance = (arrays.offset[0] + rows.indices)[:, None] - columns.indices[None, :]
        parts.append(distance >= 0)
        if plan.window is not None:
            parts.append(distance < plan.window)
    if arrays.query_segments is not None and arrays.key_segments is not None:
        query, key = arrays.query_segments[rows.slice], arrays.key_segments[columns.slice]
        parts.append(query[:, None] == key[None, :])
    if arrays.explicit is not None:
        parts.append(arrays.explicit[rows.slice, columns.slice] != 0)
    return logits, reduce(jnp.logical_and, parts) if parts else None


def _where(allowed: Array | None, x: Array, other: float) -> Array:
    """`x` where it is allowed (None: everywhere), `other` elsewhere."""
    return x if allowed is None else jnp.where(allowed, x, other)


def _keep(plan: Plan, words: Any, head: Any, rows: Span, columns: Span) -> Array | None:
    """The weights [t, s] that dropout keeps; None without dropout."""
    if words is None:
        return None
    key, second = words[0, head, rows.slice], words[1, head, rows.slice]
    return keep_columns(key, second, columns.size, columns.start, plan.rate)


def forward(plan: Plan, refs: Inputs, out_ref: Any, log_sum_ref: Any) -> None:
    """The result [t, Hv] of a long block of queries, and the logarithm of each row's sum [t]."""
    rows = Span(pl.program_id(0) * plan.long[0], plan.long[0])
    q = refs.q[rows.slice, 0, :]

    def visit(j, carry):
        highest, total, out = carry
        columns = Span(j * plan.short[1], plan.short[1])
        k, v = refs.k[columns.slice, :], refs.v[columns.slice, :]
        logits, allowed = _logits(plan, refs.arrays, q, k, rows, columns)
        logits = _where(allowed, logits, MASKED_LOGIT)
        now = jnp.maximum(highest, logits.max(1))
        weights = _where(allowed, jnp.exp2(logits - now[:, None]), 0.0)
        shrink = jnp.exp2(highest - now)
        total = total * shrink + weights.sum(1)
        weights = _where(_keep(plan, refs.words, 0, rows, columns), weights, 0.0)
        out = out * shrink[:, None] + _dot(weights.astype(v.dtype), v, (1, 0))
        return now, total, out

    highest = jnp.full((rows.size,), MASKED_LOGIT, jnp.float32)
    out = jnp.zeros((rows.size, refs.v.shape[-1]), jnp.float32)
    carry = highest, jnp.zeros_like(highest), out
    highest, total, out = jax.lax.fori_loop(refs.bounds[0], refs.bounds[1], visit, carry)
    total = jnp.where(total > 0, total, 1.0)  # `out` is zero where there is no key
    out_ref[...] = (out / (total[:, None] * (1.0 - plan.rate))).astype(out_ref.dtype)
    log_sum_ref[...] = highest + jnp.log2(total)


def _weights_and_gradient(
    plan: Plan, refs: Inputs, head: Any, q: Array, k: Array, v: Array, d_out: Array, rows, columns
):
    """The weights [t, s] of a pair of blocks after dropout, and the gradient of their logits."""
    logits, allowed = _logits(plan, refs.arrays, q, k, rows, columns)
    log_sum, inner = refs.log_sum[head, rows.slice], refs.inner[head, rows.slice]
    weights = _where(allowed, jnp.exp2(logits - log_sum[:, None]), 0.0)
    keep, factor = _keep(plan, refs.words, head, rows, columns), 1.0 / (1.0 - plan.rate)
    d_weights = _where(keep, _dot(d_out, v, (1, 1)) * factor, 0.0)
    slope = weights * (d_weights - inner[:, None]) * plan.scale
    return _where(keep, weights * factor, 0.0), slope


def query_gradient(plan: Plan, refs: Inputs, dq_ref: Any) -> None:
    """The gradient [t, H] of a long block of queries."""
    rows = Span(pl.program_id(0) * plan.long[0], plan.long[0])
    q, d_out = refs.q[rows.slice, 0, :], refs.d_out[rows.slice, 0, :]

    def visit(j, dq):
        columns = Span(j * plan.short[1], plan.short[1])
        k, v = refs.k[columns.slice, :], refs.v[columns.slice, :]
        _, slope = _weights_and_gradient(plan, refs, 0, q, k, v, d_out, rows, columns)
        return dq + _dot(slope.astype(k.dtype), k, (1, 0))

    dq = jnp.zeros((rows.size, q.shape[1]), jnp.float32)
    dq = jax.lax.fori_loop(refs.bounds[0], refs.bounds[1], visit, dq)
    dq_ref[...] = dq.astype(dq_ref.dtype)


def key_value_gradient(plan: Plan, refs: Inputs, dk_ref: Any, dv_ref: Any) -> None:
    """The gradients [s, H] and [s, Hv] of a long block of keys and values, from all G heads."""
    columns = Span(pl.program_id(0) * plan.long[1], plan.long[1])
    k, v = refs.k[columns.slice, :], refs.v[columns.slice, :]

    def visit(head, i, carry):
        dk, dv = carry
        rows = Span(i * plan.short[0], plan.short[0])
        q, d_out = refs.q[rows.slice, head, :], refs.d_out[rows.slice, head, :]
        weights, slope = _weights_and_gradient(plan, refs, head, q, k, v, d_out, rows, columns)
        dk = dk + _dot(slope.astype(q.dtype), q, (0, 0))
        return dk, dv + _dot(weights.astype(d_out.dtype), d_out, (0, 0))

    def visit_head(head, carry):
        first, end = refs.bounds[0], refs.bounds[1]
        return jax.lax.fori_loop(first, end, partial(visit, head), carry)

    carry = tuple(jnp.zeros((columns.size, x.shape[1]), jnp.float32) for x in (k, v))
    dk, dv = jax.lax.fori_loop(0, plan.group, visit_head, carry)
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


def call_kernel(
    plan: Plan, kernel: Any, inputs: Inputs, heads: int, outputs: list[tuple[Any, Any]]
) -> Any:
    """The results of `kernel` for each long block of each example, `heads` query heads at a time.

    `outputs` has for each result its shape and its blocks, a `BlockSpec`.
    """
    blocks, (batch, _, all_heads, _) = inputs.bounds.shape[1], inputs.q.shape
    shapes, specs = zip(*outputs, strict=True)
    return pl.pallas_call(
        partial(kernel, plan),
        grid=(blocks, batch, all_heads // heads),
        in_specs=[inputs.specs(plan, heads)],
        out_specs=list(specs),
        out_shape=list(shapes),
        interpret=plan.interpret,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=2),
        name=f"gpu_flash_{kernel.__name__}",
    )(inputs)


def output_like(x: Any, size: int) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    """An output with the shape of `x` [B, L, heads, F], in blocks of `size` positions."""
    block = pl.BlockSpec((None, size, None, x.shape[3]), lambda i, b, n: (b, i, n, 0))
    return jax.ShapeDtypeStruct(x.shape, x.dtype), block
