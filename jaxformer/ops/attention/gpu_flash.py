"""Flash attention for NVIDIA GPUs, written in Pallas and compiled by Triton.

It exists for what others lack: JAX's function of cuDNN packed documents, dropout and float32;
tokamax 0.0.17 dropout and float32 backward in its Mosaic kernels (those on Triton read masks [T, S]
from memory), and GPUs before Hopper. JAX 0.12 warns that Pallas' Triton backend will be removed:
only a compiled call imports it, and without it another function computes attention.

A kernel takes one long block of queries and visits short blocks of keys, or the reverse. It
computes the weights of each pair of blocks and does not store them.
"""

from dataclasses import dataclass
from functools import partial, reduce
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Int32

from jaxformer import optional_dependencies
from jaxformer.ops.attention.kernel import (
    AMPERE,
    FLASH_RESIDUALS,
    PADDING,
    AttentionSpec,
    DeviceInfo,
    Divided,
    Kernel,
    on_mesh,
    part_of_device,
    row_words,
    segments_of,
    unsupported,
)
from jaxformer.ops.dropout import keep_columns
from jaxformer.ops.manual_axes import shape_like
from jaxformer.ops.masks import MASKED_LOGIT, AttentionMask
from jaxformer.ops.padding import pad_to

_BACKEND = "jax.experimental.pallas.triton"
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tiling:
    """Static arguments. `queries` and `keys` are the lengths padded to whole blocks."""

    spec: AttentionSpec
    queries: int
    keys: int
    scale: float
    long: tuple[int, int]  # the size of a long block of queries, and of keys
    short: tuple[int, int]  # the blocks of short ones
    interpret: bool

    @property
    def group(self) -> int:
        """N // K, the heads that share one key/value head."""
        return self.spec.heads // self.spec.kv_heads


class MaskArrays(NamedTuple):
    """Traced arguments. T and S are padded to whole blocks."""

    offset: Any  # [1] int32
    query_segments: Any  # [B, T] int32 or None
    key_segments: Any  # [B, S] int32 or None


class Inputs(NamedTuple):
    """The inputs of a kernel: arrays of all examples, and in a kernel references to a part of them.

    A kernel sees the shapes on the right: one example, one key/value head, and G query heads: one,
    or all that share the key/value head.
    """

    bounds: Any  # [B, blocks, 2], [2]: the first short block to visit, the one after the last
    q: Any  # [B, T, N, H], [T, G, H]
    k: Any  # [B, S, K, H], [S, H]
    v: Any  # [B, S, K, Hv], [S, Hv]
    arrays: MaskArrays  # in a kernel [1], [T], [S]
    words: Any  # [2, B, N, T], [2, G, T]: of `DropoutRng.row_words`; None without dropout
    d_out: Any = None  # [B, T, N, Hv], [T, G, Hv]: the gradient of the result
    log_sum: Any = None  # [B, N, T], [G, T]: the logarithm to base 2 of each row's sum
    inner: Any = None  # [B, N, T], [G, T]: the inner products of the result and its gradient

    def specs(self, plan: Tiling, heads: int) -> "Inputs":
        """The part of each input at grid position (block, example, head / G); G is `heads`."""

        def spec(x: Any, shape: tuple[int | None, ...], at: Any) -> Any:
            return None if x is None else pl.BlockSpec(shape, at)

        queries, keys, arrays = plan.queries, plan.keys, self.arrays
        of_head = partial(spec, shape=(None, heads, queries), at=lambda i, b, n: (b, n, 0))

        def of_queries(x: Any) -> Any:
            size = 0 if x is None else x.shape[3]
            return spec(x, (None, queries, heads, size), lambda i, b, n: (b, 0, n, 0))

        def of_keys(x: Any) -> Any:
            shape = None, keys, None, x.shape[3]
            group = 1 if heads == plan.group else plan.group
            return spec(x, shape, lambda i, b, n: (b, 0, jax.lax.div(n, np.int32(group)), 0))

        return Inputs(
            bounds=spec(self.bounds, (None, None, 2), lambda i, b, n: (b, i, 0)),
            q=of_queries(self.q),
            k=of_keys(self.k),
            v=of_keys(self.v),
            arrays=MaskArrays(
                offset=spec(arrays.offset, (1,), lambda i, b, n: (0,)),
                query_segments=spec(arrays.query_segments, (None, queries), lambda i, b, n: (b, 0)),
                key_segments=spec(arrays.key_segments, (None, keys), lambda i, b, n: (b, 0)),
            ),
            words=spec(self.words, (2, None, heads, queries), lambda i, b, n: (0, b, n, 0)),
            d_out=of_queries(self.d_out),
            log_sum=of_head(self.log_sum),
            inner=of_head(self.inner),
        )


def _dot(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """The product of two matrices over these axes, in float32."""
    dims = ((axes[:1], axes[1:]), ((), ()))
    return jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def _logits(plan: Tiling, arrays: MaskArrays, q: Array, k: Array, rows: Any, columns: Any):
    """Scaled logits [t, s] to base 2, and which of them are allowed (None: all).

    `rows` and `columns` are slices of the queries and keys, from a start known while running.
    """
    logits = _dot(q, k, (1, 1)) * (plan.scale * _LOG2_E)
    parts = []
    if plan.spec.causal:
        query, key = (x.start + jnp.arange(x.size, dtype=jnp.int32) for x in (rows, columns))
        distance = (arrays.offset[0] + query)[:, None] - key[None, :]
        parts.append(distance >= 0)
        if plan.spec.window is not None:
            parts.append(distance < plan.spec.window)
    if arrays.query_segments is not None and arrays.key_segments is not None:
        query, key = arrays.query_segments[rows], arrays.key_segments[columns]
        parts.append(query[:, None] == key[None, :])
    return logits, reduce(jnp.logical_and, parts) if parts else None


def _where(allowed: Array | None, x: Array, other: float) -> Array:
    """`x` where it is allowed (None: everywhere), `other` elsewhere."""
    return x if allowed is None else jnp.where(allowed, x, other)


def _keep(plan: Tiling, words: Any, head: Any, rows: Any, columns: Any) -> Array | None:
    """The weights [t, s] that dropout keeps; None without dropout."""
    if words is None:
        return None
    key, second = words[0, head, rows], words[1, head, rows]
    return keep_columns(key, second, columns.size, columns.start, plan.spec.dropout)


def _forward_kernel(plan: Tiling, refs: Inputs, out_ref: Any, log_sum_ref: Any) -> None:
    """The result [t, Hv] of a long block of queries, and the logarithm of each row's sum [t]."""
    rows: Any = pl.ds(pl.program_id(0) * plan.long[0], plan.long[0])
    q = refs.q[rows, 0, :]

    def visit(j, carry):
        highest, total, out = carry
        columns: Any = pl.ds(j * plan.short[1], plan.short[1])
        k, v = refs.k[columns, :], refs.v[columns, :]
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
    out_ref[...] = (out / (total[:, None] * (1.0 - plan.spec.dropout))).astype(out_ref.dtype)
    log_sum_ref[...] = highest + jnp.log2(total)


def _weights_and_gradient(
    plan: Tiling, refs: Inputs, head: Any, q: Array, k: Array, v: Array, d_out: Array, rows, columns
):
    """The weights [t, s] of a pair of blocks after dropout, and the gradient of their logits."""
    logits, allowed = _logits(plan, refs.arrays, q, k, rows, columns)
    log_sum, inner = refs.log_sum[head, rows], refs.inner[head, rows]
    weights = _where(allowed, jnp.exp2(logits - log_sum[:, None]), 0.0)
    keep, factor = _keep(plan, refs.words, head, rows, columns), 1.0 / (1.0 - plan.spec.dropout)
    d_weights = _where(keep, _dot(d_out, v, (1, 1)) * factor, 0.0)
    slope = weights * (d_weights - inner[:, None]) * plan.scale
    return _where(keep, weights * factor, 0.0), slope


def _query_kernel(plan: Tiling, refs: Inputs, dq_ref: Any) -> None:
    """The gradient [t, H] of a long block of queries."""
    rows: Any = pl.ds(pl.program_id(0) * plan.long[0], plan.long[0])
    q, d_out = refs.q[rows, 0, :], refs.d_out[rows, 0, :]

    def visit(j, dq):
        columns: Any = pl.ds(j * plan.short[1], plan.short[1])
        k, v = refs.k[columns, :], refs.v[columns, :]
        _, slope = _weights_and_gradient(plan, refs, 0, q, k, v, d_out, rows, columns)
        return dq + _dot(slope.astype(k.dtype), k, (1, 0))

    dq = jnp.zeros((rows.size, q.shape[1]), jnp.float32)
    dq = jax.lax.fori_loop(refs.bounds[0], refs.bounds[1], visit, dq)
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _key_value_kernel(plan: Tiling, refs: Inputs, dk_ref: Any, dv_ref: Any) -> None:
    """The gradients [s, H] and [s, Hv] of a long block of keys and values, from all G heads."""
    columns: Any = pl.ds(pl.program_id(0) * plan.long[1], plan.long[1])
    k, v = refs.k[columns, :], refs.v[columns, :]

    def visit(head, i, carry):
        dk, dv = carry
        rows: Any = pl.ds(i * plan.short[0], plan.short[0])
        q, d_out = refs.q[rows, head, :], refs.d_out[rows, head, :]
        weights, slope = _weights_and_gradient(plan, refs, head, q, k, v, d_out, rows, columns)
        dk = dk + _dot(slope.astype(q.dtype), q, (0, 0))
        return dk, dv + _dot(weights.astype(d_out.dtype), d_out, (0, 0))

    def visit_head(head, carry):
        return jax.lax.fori_loop(refs.bounds[0], refs.bounds[1], partial(visit, head), carry)

    carry = tuple(jnp.zeros((columns.size, x.shape[1]), jnp.float32) for x in (k, v))
    dk, dv = jax.lax.fori_loop(0, plan.group, visit_head, carry)
    dk_ref[...], dv_ref[...] = dk.astype(dk_ref.dtype), dv.astype(dv_ref.dtype)


def _call_kernel(
    plan: Tiling, kernel: Any, inputs: Inputs, heads: int, outputs: list[tuple[Any, Any]]
) -> Any:
    """The results of `kernel` for each long block of each example, `heads` query heads at a time.

    `outputs` are pairs of a shape and a `BlockSpec`.
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
        compiler_params=None if plan.interpret else _compiler_params(),
        name=f"gpu_flash{kernel.__name__}",
    )(inputs)


def _compiler_params() -> Any:
    return import_module(_BACKEND).CompilerParams(num_warps=8, num_stages=2)


def _in_blocks(
    output: jax.ShapeDtypeStruct, size: int
) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
    """An `output` [B, L, heads, F], in blocks of `size` positions."""
    return output, pl.BlockSpec((None, size, None, output.shape[3]), lambda i, b, n: (b, i, n, 0))


def make_plan(spec: AttentionSpec, scale: float, interpret: bool) -> Tiling:
    """The plan of a call, with the lengths padded to whole blocks."""
    lengths = spec.queries, spec.keys
    # Blocks of FlashAttention-2's Triton tutorial, not measured here. On an L4, where the compiler
    # allows 101,376 bytes of shared memory, they need 98,944 at most.
    longest, shortest = (64, 32) if spec.dtype == "float32" else (128, 32)
    long = tuple(min(longest, _power_of_two(length)) for length in lengths)
    short = tuple(min(shortest, _power_of_two(length)) for length in lengths)
    queries, keys = (-(-length // size) * size for length, size in zip(lengths, long, strict=True))
    return Tiling(spec, queries, keys, scale, (long[0], long[1]), (short[0], short[1]), interpret)


def make_mask_arrays(plan: Tiling, mask: AttentionMask, spec: AttentionSpec) -> MaskArrays:
    """The arrays of `mask`; padding keys get a segment of their own."""
    offset = jnp.asarray(mask.offset, jnp.int32).reshape(1)
    if not (spec.segments or spec.padding_mask) and plan.keys == spec.keys:
        return MaskArrays(offset, None, None)
    query, key = segments_of(mask, spec)
    # Padding queries get the last query's segment, which adds no block of keys to visit.
    query = jnp.pad(query, ((0, 0), (0, plan.queries - spec.queries)), mode="edge")
    key = jnp.pad(key, ((0, 0), (0, plan.keys - spec.keys)), constant_values=PADDING)
    return MaskArrays(offset, query, key)


def block_bounds(
    plan: Tiling, arrays: MaskArrays, queries: int, keys: int, of_keys: bool = False
) -> Int32[Array, "B blocks 2"]:
    """The first block of keys to visit for each block of queries, and the one after the last.

    These are all in which a query sees a key, and perhaps some others. Blocks have `queries` and
    `keys` positions. With `of_keys`, the blocks of queries for each block of keys.
    """
    first_query = arrays.offset[0] + jnp.arange(0, plan.queries, queries)[:, None]
    first_key = jnp.arange(0, plan.keys, keys)[None, :]
    seen = jnp.ones((1, first_query.size, first_key.size), bool)
    if plan.spec.causal:
        seen &= (first_key < first_query + queries)[None]
    if plan.spec.window is not None:
        seen &= (first_key + keys > first_query - plan.spec.window + 1)[None]
    if arrays.query_segments is not None and arrays.key_segments is not None:
        query = arrays.query_segments.reshape(-1, first_query.size, queries, 1)
        key = arrays.key_segments.reshape(-1, 1, first_key.size, keys)
        lowest_key = jnp.where(key == PADDING, np.iinfo(np.int32).max, key).min(3)
        seen = seen & (query.min(2) <= key.max(3)) & (lowest_key <= query.max(2))
    seen = seen.swapaxes(1, 2) if of_keys else seen
    end = jnp.where(seen.any(2), seen.shape[2] - jnp.argmax(seen[:, :, ::-1], 2), 0)
    bounds = jnp.stack([jnp.minimum(jnp.argmax(seen, 2), end), end], 2).astype(jnp.int32)
    return jnp.broadcast_to(bounds, (plan.spec.batch, *bounds.shape[1:]))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Tiling, q: Array, k: Array, v: Array, arrays: MaskArrays, words: Any) -> Array:
    return _forward(plan, q, k, v, arrays, words)[0]


def _forward(plan: Tiling, q: Array, k: Array, v: Array, arrays: MaskArrays, words: Any):
    """Attention, and what the backward pass needs."""
    batch, queries, heads, _ = q.shape
    bounds = block_bounds(plan, arrays, plan.long[0], plan.short[1])
    inputs = Inputs(bounds, q, k, v, arrays, words)
    out = shape_like(q, (batch, queries, heads, v.shape[3]), v.dtype)
    log_sum = shape_like(q, (batch, heads, queries), jnp.float32)
    of_block = pl.BlockSpec((None, None, plan.long[0]), lambda i, b, n: (b, n, i))
    outputs = [_in_blocks(out, plan.long[0]), (log_sum, of_block)]
    computed = _call_kernel(plan, _forward_kernel, inputs, 1, outputs)
    out, log_sum = checkpoint_name(computed, FLASH_RESIDUALS)
    return out, (q, k, v, arrays, words, out, log_sum)


def _backward(plan: Tiling, saved: Any, d_out: Array):
    """The gradients of q, k and v from the gradient `d_out` [B, T, N, Hv] of the result."""
    q, k, v, arrays, words, out, log_sum = saved
    inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), 3).swapaxes(1, 2)
    (long_q, long_k), (short_q, short_k) = plan.long, plan.short
    bounds = block_bounds(plan, arrays, long_q, short_k)
    inputs = Inputs(bounds, q, k, v, arrays, words, d_out.astype(v.dtype), log_sum, inner)
    of_q, of_k, of_v = (shape_like(x, x.shape, x.dtype) for x in (q, k, v))
    (dq,) = _call_kernel(plan, _query_kernel, inputs, 1, [_in_blocks(of_q, long_q)])
    inputs = inputs._replace(bounds=block_bounds(plan, arrays, short_q, long_k, of_keys=True))
    outputs = [_in_blocks(of_k, long_k), _in_blocks(of_v, long_k)]
    dk, dv = _call_kernel(plan, _key_value_kernel, inputs, plan.group, outputs)
    return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)


def _power_of_two(size: int) -> int:
    """The least power of two from `size` on, at least 16: tensor cores multiply no less."""
    return max(16, 1 << (size - 1).bit_length())


def _compute(
    q: Array, k: Array, v: Array, mask: AttentionMask, *, scale: float, **options: Any
) -> Array:
    spec, device = AttentionSpec.create(q, k, v, mask, **options), DeviceInfo.current()
    plan = make_plan(part_of_device(spec), scale, interpret=device.platform != "gpu")
    axes = *[Divided()] * 3, Divided(heads=None), Divided(rows=1)
    attend = on_mesh(partial(_attend, plan), spec, axes)
    words = row_words(options["dropout"], spec)
    words = None if words is None else pad_to(words, 3, plan.queries)
    q, k, v = (pad_to(x, 3, _power_of_two(x.shape[3])) for x in (q, k, v))
    q, k, v = pad_to(q, 1, plan.queries), pad_to(k, 1, plan.keys), pad_to(v, 1, plan.keys)
    out = attend(q, k, v, make_mask_arrays(plan, mask, spec), words)
    return out[:, : spec.queries, :, : spec.value_size]


def _reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    dtypes = "bfloat16", "float16", "float32"
    reasons = unsupported(spec, dtypes, ("explicit", "bias", "softcap"))
    if max(spec.key_size, spec.value_size) > 128:
        sizes = f"{spec.key_size} and {spec.value_size}"
        reasons.append(f"supports a head_dim of at most 128, not {sizes}")
    if not optional_dependencies.is_there(_BACKEND):
        reasons.append(f"needs Pallas' Triton backend, but JAX {jax.__version__} has none")
    return reasons


gpu_flash: Kernel = Kernel(
    "gpu_flash",
    _compute,
    _reasons,
    DeviceInfo("gpu", "", AMPERE),
    least_queries=16,  # decoding has fewer, and therefore few weights
)
"""Attention by three kernels: forward, the gradient of `q`, the gradients of `k` and `v`.

The algorithm is FlashAttention-2 (Dao 2023). The weights [T, S] are never stored. For each
long block the kernels visit the range of short blocks that `causal`, `window`, `offset`, padding
and segments allow, so that packed documents take the time of their own lengths. Each kernel
computes the mask of `DropoutRng.keep_mask` again. Padding becomes a segment to which no query
belongs, so no segment may have the number -2^31. Products of float32 have the precision of
`jax.default_matmul_precision`: TF32 unless set.
"""
