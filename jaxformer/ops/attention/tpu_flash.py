"""Flash attention on TPUs that reads and writes heads side by side, without another layout.

Heads lie side by side in the lanes, as the projections give them: [B, T, N * H]. A block holds the
`width` lanes of one head, or of as many heads as fit into 128 lanes. A product for one of these
heads has zeros in the lanes of the others, which costs no more than padding the head would.

Names: `q_segments` and `k_segments` are columns [L, 128] or rows [8, L] of equal lanes or rows.
`words` are rows too, two for each head (see `DropoutRng.row_words`).
`top` is the largest score of a query so far, `total` the sum of the weights. Scores are in units of
log(2), because a TPU has an instruction for 2^x.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxformer.ops.attention.spec import (
    FLASH_RESIDUALS,
    AttentionSpec,
    Call,
    DeviceFunction,
    DeviceInfo,
    heads_per_device,
    on_mesh,
    value_size_reasons,
)
from jaxformer.ops.attention.tpu_blocks import LANES, Plan
from jaxformer.ops.attention.tpu_splash import block_size, segment_ids, tpu_splash
from jaxformer.ops.dropout import keep_elements
from jaxformer.ops.masks import MASKED_LOGIT

SUBLANES = 8
_MOST_QUERIES = 4096  # the gradient of a head's queries stays on the chip, in float32
_PADDED_FROM = 512  # at most a fifth of a longer one is padding
_ROWS = ((1,), (1,))  # the last axes of both operands are summed
_COLUMNS = ((0,), (0,))  # the first axes


def _forward(plan: Plan, q: Any, k: Any, v: Any, segments: Any, words: Any) -> tuple[Array, Array]:
    """Attention [B, T, N * H], and the logarithm to base 2 of each query's sum [B, G, 8, T].

    In the second, row h of the 8 is head h of the group.
    """
    groups, blocks_q, blocks_k = plan.grid
    batch, bq, bk, width = q.shape[0], plan.block_q, plan.block_k, plan.width

    def key_block(i: Any, j: Any) -> Any:
        return jnp.minimum(j, plan.last_key_block(i))  # a block that is not seen is not fetched

    at_q = pl.BlockSpec((1, bq, width), lambda b, g, i, j: (b, i, g))
    at_k = pl.BlockSpec((1, bk, width), lambda b, g, i, j: (b, key_block(i, j), g))
    at_segments = (
        pl.BlockSpec((1, bq, LANES), lambda b, g, i, j: (b, i, 0)),
        pl.BlockSpec((1, SUBLANES, bk), lambda b, g, i, j: (b, 0, key_block(i, j))),
    )
    at_words = pl.BlockSpec((1, 1, 2 * SUBLANES, bq), lambda b, g, i, j: (b, g, 0, i))
    of_heads = pltpu.VMEM((width // plan.head_dim, bq, LANES), jnp.float32)
    arrays = None if segments is None else (_columns(segments[0]), _rows(segments[1]))
    specs = None if segments is None else at_segments, None if words is None else at_words
    out, log_sum = pl.pallas_call(
        partial(_forward_kernel, plan),
        grid=(batch, groups, blocks_q, blocks_k),
        in_specs=[at_q, at_k, at_k, *specs],
        out_specs=[at_q, pl.BlockSpec((1, 1, SUBLANES, bq), lambda b, g, i, j: (b, g, 0, i))],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, v.dtype),
            jax.ShapeDtypeStruct((batch, groups, SUBLANES, plan.queries), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((bq, width), jnp.float32), of_heads, of_heads],
        compiler_params=_parameters(),
        name="tpu_flash_fwd",
        interpret=plan.interpret,
    )(q, k, v, arrays, words)
    return out, log_sum


def _backward(
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    segments: Any,
    words: Any,
    out: Any,
    log_sum: Any,
    d_out: Any,
) -> list[Array]:
    """The gradients of q, k and v from that of attention; the queries' stays on the chip."""
    groups, blocks_q, blocks_k = plan.grid
    batch, bq, bk, width = q.shape[0], plan.block_q, plan.block_k, plan.width

    def query_block(i: Any, j: Any) -> Any:
        return jnp.maximum(i, plan.first_query_block(j))

    at_q = pl.BlockSpec((1, bq, width), lambda b, g, j, i: (b, query_block(i, j), g))
    at_k = pl.BlockSpec((1, bk, width), lambda b, g, j, i: (b, j, g))
    at_sum = pl.BlockSpec((1, 1, SUBLANES, bq), lambda b, g, j, i: (b, g, 0, query_block(i, j)))
    at_segments = (
        pl.BlockSpec((1, SUBLANES, bq), lambda b, g, j, i: (b, 0, query_block(i, j))),
        pl.BlockSpec((1, bk, LANES), lambda b, g, j, i: (b, j, 0)),
    )
    at_words = pl.BlockSpec(
        (1, 1, 2 * SUBLANES, bq), lambda b, g, j, i: (b, g, 0, query_block(i, j))
    )
    arrays = None if segments is None else (_rows(segments[0]), _columns(segments[1]))
    specs = None if segments is None else at_segments, None if words is None else at_words
    return pl.pallas_call(
        partial(_backward_kernel, plan),
        grid=(batch, groups, blocks_k, blocks_q),
        in_specs=[at_q, at_k, at_k, at_q, at_sum, at_q, *specs],
        out_specs=[
            pl.BlockSpec((1, plan.queries, width), lambda b, g, j, i: (b, 0, g)),
            at_k,
            at_k,
        ],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        scratch_shapes=[pltpu.VMEM((rows, width), jnp.float32) for rows in (plan.queries, bk, bk)],
        compiler_params=_parameters(),
        name="tpu_flash_bwd",
        interpret=plan.interpret,
    )(q, k, v, out, log_sum, d_out, arrays, words)


def _parameters() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
    )


def _columns(segments: Array) -> Array:
    return jnp.broadcast_to(segments[:, :, None], (*segments.shape, LANES))


def _rows(segments: Array) -> Array:
    batch, length = segments.shape
    return jnp.broadcast_to(segments[:, None, :], (batch, SUBLANES, length))


def _dot(a: Array, b: Array, axes: Any, precision: Any = None) -> Array:
    return jax.lax.dot_general(
        a, b, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _of_head(plan: Plan, x: Array, head: int, others: Any = 0) -> Array:
    """`x` [L, width] in the lanes of `head`, `others` in those of the other heads."""
    if plan.head_dim == plan.width:
        return x
    lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(lane // plan.head_dim == head, x, others)


def _allowed(plan: Plan, i: Any, j: Any, same: Any, shape: tuple[int, int], axis: int) -> Any:
    """The keys that queries may see in a block whose axis `axis` is that of the queries."""
    if not plan.causal:
        return same
    query = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + (plan.offset + i * plan.block_q)
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 1 - axis) + j * plan.block_k
    return key <= query if same is None else (key <= query) & same


def _keep(plan: Plan, key: Array, second: Array, j: Any, shape: tuple[int, int], axis: int) -> Any:
    """The weights that dropout keeps in a block whose axis `axis` is that of the keys."""
    column = jax.lax.broadcasted_iota(jnp.int32, shape, axis) + j * plan.block_k
    return keep_elements(key, second, column.astype(jnp.uint32), plan.dropout)


def _forward_kernel(
    plan: Plan, q_ref: Any, k_ref: Any, v_ref: Any, segments: Any, words: Any, *refs: Any
) -> None:
    out_ref, sum_ref, acc, top, total = refs
    i, j = pl.program_id(2), pl.program_id(3)
    heads, factor = plan.width // plan.head_dim, plan.scale / math.log(2)

    @pl.when(j == 0)
    def _() -> None:
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, MASKED_LOGIT)
        total[...] = jnp.zeros_like(total)

    @pl.when(plan.sees(i, j))
    def _() -> None:
        q, k, v = q_ref[0], k_ref[0], v_ref[0]
        same = None if segments is None else segments[0][0, :, :1] == segments[1][0, :1, :]
        shape = plan.block_q, plan.block_k
        allowed = _allowed(plan, i, j, same, shape, 0)
        columns = None if words is None else words[0, 0].T
        for head in range(heads):
            scores = _dot(_of_head(plan, q, head), k, _ROWS) * factor
            scores = scores if allowed is None else jnp.where(allowed, scores, MASKED_LOGIT)
            before = top[head]
            now = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            weights = jnp.exp2(scores - now[:, :1])
            weights = weights if allowed is None else jnp.where(allowed, weights, 0.0)
            shrink = jnp.exp2(before - now)
            top[head] = now
            total[head] = total[head] * shrink + weights.sum(axis=1, keepdims=True)
            if columns is not None:
                key, second = (columns[:, n : n + 1] for n in (head, SUBLANES + head))
                weights = jnp.where(_keep(plan, key, second, j, shape, 1), weights, 0.0)
            summed = acc[...] * shrink[:, :1] + _dot(weights.astype(v.dtype), v, ((1,), (0,)))
            acc[...] = _of_head(plan, summed, head, acc[...])

    @pl.when(j == plan.grid[2] - 1)
    def _() -> None:
        out = acc[...]
        for head in range(heads):
            sums = total[head]
            some = sums > 0.0  # a query without keys gets zeros
            kept = jnp.where(some, sums, 1.0) * (1.0 - plan.dropout)
            inverse = jnp.where(some, 1.0 / kept, 0.0)
            out = _of_head(plan, out * inverse[:, :1], head, out)
            log_sum = top[head] + jnp.log2(jnp.where(some, sums, 1.0))
            sum_ref[0, 0, head : head + 1, :] = log_sum.T[:1, :]
        out_ref[0] = out.astype(out_ref.dtype)


def _backward_kernel(plan: Plan, *refs: Any) -> None:
    q_ref, k_ref, v_ref, out_ref, sum_ref, d_out_ref, segments, words = refs[:8]
    dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum = refs[8:]
    j, i = pl.program_id(2), pl.program_id(3)
    heads, to_base_2 = plan.width // plan.head_dim, plan.scale / math.log(2)

    @pl.when((i == 0) & (j == 0))
    def _() -> None:
        dq_sum[...] = jnp.zeros_like(dq_sum)

    @pl.when(i == 0)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(plan.sees(i, j))
    def _() -> None:
        q, k, v, d_out = q_ref[0], k_ref[0], v_ref[0], d_out_ref[0]
        same = None if segments is None else segments[1][0, :, :1] == segments[0][0, :1, :]
        shape = plan.block_k, plan.block_q
        allowed = _allowed(plan, i, j, same, shape, 1)
        inner = _inner(plan, out_ref[0], d_out)
        at = pl.ds(pl.multiple_of(i * plan.block_q, plan.block_q), plan.block_q)
        for head in range(heads):
            q_head, d_head = _of_head(plan, q, head), _of_head(plan, d_out, head)
            scores = _dot(k, q_head, _ROWS) * to_base_2  # [keys, queries], so that sums are rows
            weights = jnp.exp2(scores - sum_ref[0, 0, head : head + 1, :])
            weights = weights if allowed is None else jnp.where(allowed, weights, 0.0)
            kept, d_weights = weights, _dot(v, d_head, _ROWS)
            if words is not None:
                key, second = (words[0, 0, n : n + 1, :] for n in (head, SUBLANES + head))
                factor_kept = jnp.where(
                    _keep(plan, key, second, j, shape, 0), 1 / (1 - plan.dropout), 0.0
                )
                kept, d_weights = weights * factor_kept, d_weights * factor_kept
            dv_sum[...] += _dot(kept.astype(d_out.dtype), d_head, ((1,), (0,)))
            d_scores = weights * (d_weights - inner[head : head + 1, :])
            low = d_scores.astype(q.dtype)
            dk_sum[...] += _dot(low, q_head, ((1,), (0,)))
            dq_sum[at, :] += _of_head(plan, _dot(low, k, _COLUMNS), head, 0.0)

    @pl.when(i == plan.grid[1] - 1)
    def _() -> None:
        dk_ref[0] = (dk_sum[...] * plan.scale).astype(dk_ref.dtype)
        dv_ref[0] = dv_sum[...].astype(dv_ref.dtype)

    @pl.when((i == plan.grid[1] - 1) & (j == plan.grid[2] - 1))
    def _() -> None:
        dq_ref[0] = (dq_sum[...] * plan.scale).astype(dq_ref.dtype)


def _inner(plan: Plan, out: Array, d_out: Array) -> Array:
    """The inner products [8, block_q] of `out` and `d_out`; row h is head h of the block."""
    row = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, plan.width), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, plan.width), 1)
    of_head = (lane // plan.head_dim == row).astype(jnp.float32)
    product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    return _dot(of_head, product, _ROWS, jax.lax.Precision.HIGHEST)


def _compute(call: Call) -> Array:
    spec, mask = call.spec, call.mask
    queries, keys = (-(-length // LANES) * LANES for length in (spec.queries, spec.keys))
    # Blocks of 1,024 with dropout need more memory than the chip has where 8 heads share the lanes.
    longest = 512 if spec.dropout else 1024
    plan = Plan(
        queries=queries,
        keys=keys,
        heads=heads_per_device(spec)[0],
        head_dim=spec.key_size,
        block_q=min(block_size(queries, call.device), longest),
        block_k=min(block_size(keys, call.device), longest),
        causal=spec.causal,
        offset=spec.offset or 0,
        scale=call.scale,
        dropout=spec.dropout,
        interpret=call.interpret,
    )
    if keys > spec.keys and mask.padding_mask is None:
        mask = replace(mask, padding_mask=jnp.ones((spec.batch, spec.keys), bool))
    segments = segment_ids(mask, spec)
    if segments is not None:
        segments = _pad(segments[0], queries), _pad(segments[1], keys, jnp.iinfo(jnp.int32).min)
    flat = (x.reshape(*x.shape[:2], -1) for x in (call.q, call.k, call.v))
    q, k, v = (_pad(x, length) for x, length in zip(flat, (queries, keys, keys), strict=True))
    attend = on_mesh(partial(_attend, plan), spec, (2, 2, 2, None, 1), 2)
    out = attend(q, k, v, segments, _words(plan, call))
    return out[:, : spec.queries].reshape(call.q.shape)


def _words(plan: Plan, call: Call) -> Array | None:
    """The two words of each row of the dropout's mask [B, G, 16, T]; None without dropout.

    Row h of the 16 is the first word of head h of the group, row 8 + h its second.
    """
    dropout, spec = call.dropout, call.spec
    if not plan.dropout or dropout is None or dropout.dropout_rng is None:
        return None
    words = dropout.dropout_rng.row_words(dropout.name, (spec.batch, spec.heads, spec.queries))
    heads = plan.width // plan.head_dim
    words = words.reshape(2, spec.batch, -1, heads, spec.queries)
    empty = SUBLANES - heads, plan.queries - spec.queries
    words = jnp.pad(words, ((0, 0), (0, 0), (0, 0), (0, empty[0]), (0, empty[1])))
    return jnp.moveaxis(words, 0, 2).reshape(*words.shape[1:3], 2 * SUBLANES, plan.queries)


def _pad(x: Array, length: int, value: int = 0) -> Array:
    """`x` [B, L, ...] with `value` after its positions until there are `length`."""
    widths = [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, widths, constant_values=value)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, segments: Any, words: Any) -> Array:
    return _forward(plan, q, k, v, segments, words)[0]


def _attend_forward(plan: Plan, q: Array, k: Array, v: Array, segments: Any, words: Any) -> Any:
    out, log_sum = checkpoint_name(_forward(plan, q, k, v, segments, words), FLASH_RESIDUALS)
    return out, (q, k, v, segments, words, out, log_sum)


def _attend_backward(plan: Plan, saved: Any, d_out: Array) -> Any:
    q, k, v, segments, words, out, log_sum = saved
    return *_backward(plan, q, k, v, segments, words, out, log_sum, d_out), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _limits(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    reasons = value_size_reasons(spec)
    for length in (spec.queries, spec.keys):
        if length % LANES and length < _PADDED_FROM:
            reasons.append(
                f"needs lengths from {_PADDED_FROM} on, or multiples of {LANES}, not {length}"
            )
    if spec.heads != spec.kv_heads:
        reasons.append(f"needs as many heads of keys as of queries, not {spec.kv_heads}")
    heads, size = heads_per_device(spec)[0], spec.key_size
    if size < 16 or LANES % min(size, LANES) or size % min(size, LANES) or heads * size % LANES:
        reasons.append(
            f"needs heads that fill groups of {LANES} lanes, but a device has {heads} heads of "
            f"{size}"
        )
    if spec.queries > _MOST_QUERIES:
        reasons.append(f"supports at most {_MOST_QUERIES} queries, but T={spec.queries}")
    return reasons


tpu_flash: DeviceFunction = replace(
    tpu_splash,
    name="tpu_flash",
    compute=_compute,
    lacks=("softcap", "window", *(name for name in tpu_splash.lacks if name != "dropout")),
    limits=_limits,
)
"""Attention by a Pallas kernel for TPUs.

Splash attention takes arrays [B, N, T, H], so XLA copies queries, keys, values and their gradients
into that layout, where a head of 64 fills half of a TPU's 128 lanes. This function takes the layout
[B, T, N * H] of the projections, in which no lane is empty. One kernel computes the three
gradients, and each kernel computes the mask of `DropoutRng.keep_mask` again. Lengths from 512 on
are padded to multiples of 128. Causal masks skip the blocks in which no query sees a key; padding
is a segment, as in `tpu_splash`.
"""
