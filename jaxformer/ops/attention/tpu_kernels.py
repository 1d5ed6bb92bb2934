"""The two kernels of `tpu_flash`.

Scores are [keys, queries]: what belongs to a query is a row. Queries, keys and values are
transposed on the chip to [width, L], where a head is a slice of rows. Products of a head with its
scores have H rows, so a head of 64 costs half of one of 128. For the scores themselves the rows of
the other heads are zeros.

Names: `q_segments` are rows [8, T] of equal rows, `k_segments` columns [S, 128] of equal lanes.
`words` are rows too, two for each head (see `DropoutRng.row_words`). `top` is the largest score of
a query so far, `total` the sum of the weights. Scores are in units of log(2), because a TPU has an
instruction for 2^x.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxformer.ops.attention.tpu_blocks import SUBLANES, Tiling
from jaxformer.ops.dropout import keep_elements
from jaxformer.ops.manual_axes import shape_like
from jaxformer.ops.masks import MASKED_LOGIT
from jaxformer.ops.tpu_tiles import LANES

_DEFAULT_MEMORY = 2**24  # which the compiler grants in any case
_LOWEST = MASKED_LOGIT / 2  # above masked scores, so that their weights are 0
_ROWS = ((1,), (1,))  # the last axes of both operands are summed
_PRODUCT = ((1,), (0,))


def forward(plan: Tiling, q: Any, k: Any, v: Any, segments: Any, words: Any) -> tuple[Array, Array]:
    """Attention [B, T, G * width], and the logarithm to base 2 of each query's sum [B, G, 8, T].

    In the second, row h of the 8 is head h of the group.
    """
    out = shape_like(q, q.shape, v.dtype)
    sums = (q.shape[0], q.shape[2] // plan.width, SUBLANES, plan.queries)
    at_q, at_sum, in_specs = _specs(plan, segments, words)
    bq, width = plan.block_q, plan.width
    row = pltpu.VMEM((SUBLANES, bq), jnp.float32)
    return pl.pallas_call(
        partial(_forward_kernel, plan),
        grid=(q.shape[0], *plan.grid),
        in_specs=in_specs,
        out_specs=[at_q, at_sum],
        out_shape=[out, shape_like(q, sums, jnp.float32)],
        scratch_shapes=[
            pltpu.VMEM((plan.packed, width, bq), q.dtype),
            pltpu.VMEM((width, bq), jnp.float32),
            row,
            row,
            pltpu.VMEM((width, plan.block_k), v.dtype),
        ],
        **_options(plan, q.dtype, "tpu_flash_fwd"),
    )(q, k, v, *_arrays(segments, words))


def backward(
    plan: Tiling,
    q: Any,
    k: Any,
    v: Any,
    segments: Any,
    words: Any,
    out: Any,
    log_sum: Any,
    d_out: Any,
    dtype: Any,
) -> list[Array]:
    """The gradients of q, in `dtype`, k and v; k's and v's stay on the chip until the end."""
    at_q, at_sum, in_specs = _specs(plan, segments, words)
    bq, width = plan.block_q, plan.width
    at_all = pl.BlockSpec((1, plan.keys, width), lambda b, g, c, i, n: (b, 0, g))
    return pl.pallas_call(
        partial(_backward_kernel, plan),
        grid=(q.shape[0], *plan.grid),
        in_specs=[*in_specs, at_q, at_sum, at_q],
        out_specs=[at_q, at_all, at_all],
        out_shape=[
            shape_like(q, q.shape, dtype),
            *(shape_like(x, x.shape, x.dtype) for x in (k, v)),
        ],
        scratch_shapes=[
            *(pltpu.VMEM((plan.packed, width, bq), q.dtype) for _ in range(2)),
            pltpu.VMEM((SUBLANES, bq), jnp.float32),
            pltpu.VMEM((width, bq), jnp.float32),
            *(pltpu.VMEM((width, plan.keys), jnp.float32) for _ in range(2)),
            pltpu.VMEM((width, plan.block_k), k.dtype),
        ],
        **_options(plan, q.dtype, "tpu_flash_bwd"),
    )(q, k, v, *_arrays(segments, words), out, log_sum, d_out)


def _specs(plan: Tiling, segments: Any, words: Any) -> Any:
    """The blocks of an array of queries, of rows of queries, and of what both kernels read."""
    bq, bk, width = plan.block_q, plan.block_k, plan.width
    at_q = pl.BlockSpec((1, bq, width), lambda b, g, c, i, n: (b, i, g * plan.share + c))
    at_k = pl.BlockSpec((1, bk, width), lambda b, g, c, i, n: (b, plan.key_block(i, n), g))

    def rows(count: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, count, bq), lambda b, g, c, i, n: (b, g * plan.share + c, 0, i))

    of_queries = pl.BlockSpec((1, SUBLANES, bq), lambda b, g, c, i, n: (b, 0, i))
    of_keys = pl.BlockSpec((1, bk, LANES), lambda b, g, c, i, n: (b, plan.key_block(i, n), 0))
    of_segments = None if segments is None else (of_queries, of_keys)
    of_words = None if words is None else rows(2 * SUBLANES)
    return at_q, rows(SUBLANES), [at_q, at_k, at_k, of_segments, of_words]


def _arrays(segments: Any, words: Any) -> tuple[Any, Any]:
    if segments is None:
        return None, words
    query, key = segments
    rows = jnp.broadcast_to(query[:, None, :], (query.shape[0], SUBLANES, query.shape[1]))
    return (rows, jnp.broadcast_to(key[:, :, None], (*key.shape, LANES))), words


def _options(plan: Tiling, dtype: Any, name: str) -> dict[str, Any]:
    """The compiler parameters of both calls; `metadata` is for readers of its programs."""
    needed = plan.needed_memory(jnp.dtype(dtype).itemsize)
    parameters = pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
        vmem_limit_bytes=max(needed, _DEFAULT_MEMORY),
    )
    return {
        "compiler_params": parameters,
        "metadata": {
            "call": str(plan.spec),
            "block_q": str(plan.block_q),
            "block_kv": str(plan.block_k),
            "first_key": str(plan.first_key),
        },
        "name": name,
        "interpret": plan.interpret,
    }


def _dot(a: Array, b: Array, axes: Any = _PRODUCT) -> Array:
    return jax.lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32)


def _rows(plan: Tiling, head: int) -> slice:
    """The rows of a head of the queries."""
    return slice(head * plan.head_dim, (head + 1) * plan.head_dim)


def _key_rows(plan: Tiling) -> list[Any]:
    """For each head of the queries the rows of the head of keys that it reads."""
    ratio, size = plan.heads // plan.kv_heads, plan.head_dim
    if plan.packed == 1 or ratio == 1:
        return [pl.ds(head * size, size) for head in range(plan.packed)]
    first = (pl.program_id(1) * plan.share + pl.program_id(2)) * plan.packed
    slots = (
        jax.lax.rem(jax.lax.div(first + head, ratio), plan.packed) for head in range(plan.packed)
    )
    return [pl.ds(pl.multiple_of(slot * size, size), size) for slot in slots]


def _spread(plan: Tiling, x: Array, key_rows: list[Any], ref: Any) -> None:
    """Writes each head of `x` [width, L] into the rows of its keys, with zeros in the others."""
    if plan.packed > 1:
        ref[...] = jnp.zeros_like(ref)
    for head, of_keys in enumerate(key_rows):
        ref[head, of_keys, :] = x[_rows(plan, head)]


def _allowed(plan: Tiling, i: Any, j: Any, segments: Any, by_position: bool) -> Any:
    """A function (keys, queries) of two slices of a block: the keys that its queries may see.

    It returns [keys, queries], or None where they may see all of them. Without `by_position` their
    positions hide none.
    """

    def allowed(keys: slice, queries: slice) -> Any:
        seen = None
        if by_position:
            shape = keys.stop - keys.start, queries.stop - queries.start
            first = plan.first_key + j * plan.block_k + keys.start
            key = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + first
            seen = key < plan.spec.keys
            if plan.spec.causal:
                first = plan.offset + i * plan.block_q + queries.start
                query = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + first
                seen &= key <= query
                if plan.spec.window is not None:
                    seen &= query - key < plan.spec.window
        if segments is not None:
            columns = [segments[1][0, keys]] * ((queries.stop - queries.start) // LANES)
            same = jnp.concatenate(columns, 1) == segments[0][0, :1, queries]
            seen = same if seen is None else seen & same
        return seen

    return allowed


def _keep(plan: Tiling, words: Any, head: int, j: Any) -> Any:
    """The weights [block_k, block_q] that dropout keeps."""
    key, second = (words[0, 0, n : n + 1, :] for n in (head, SUBLANES + head))
    shape = plan.block_k, plan.block_q
    column = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (plan.first_key + j * plan.block_k)
    return keep_elements(key, second, column.astype(jnp.uint32), plan.spec.dropout)


def _scores(plan: Tiling, products: Array, allowed: Any) -> tuple[Array, Array | None]:
    """The scores, and the hyperbolic tangents of a soft cap."""
    if plan.spec.softcap is None:
        scores, tanh = products * (plan.scale / math.log(2)), None
    else:
        tanh = jnp.tanh(products * (plan.scale / plan.spec.softcap))
        scores = tanh * (plan.spec.softcap / math.log(2))
    return scores if allowed is None else jnp.where(allowed, scores, MASKED_LOGIT), tanh


def _tiles(length: int) -> list[slice]:
    """The parts of a block that the forward kernel computes.

    The matrix unit computes them, and nothing is written before all are computed: the compiler
    then multiplies one while it computes the weights of another.
    """
    return [slice(first, first + LANES) for first in range(0, length, LANES)]


def _each_block(plan: Tiling, segments: Any, compute: Any) -> None:
    """Calls `compute(j, allowed)` for the block of keys of this step, if a query may see one.

    `allowed` is a function, see `_allowed`.
    """
    i, step = pl.program_id(3), pl.program_id(4)
    j = plan.key_block(i, step)
    sees, all_seen = plan.sees(i, step), plan.all_seen(i, j)

    def visit(by_position: bool) -> None:
        compute(j, _allowed(plan, i, j, segments, by_position))

    pl.when(sees & all_seen)(lambda: visit(False))
    pl.when(sees & jnp.logical_not(all_seen))(lambda: visit(True))


def _forward_kernel(
    plan: Tiling, q_ref: Any, k_ref: Any, v_ref: Any, segments: Any, words: Any, *refs: Any
) -> None:
    out_ref, sum_ref, q_spread, acc, top, total, v_rows = refs
    step, key_rows = pl.program_id(4), _key_rows(plan)

    @pl.when(step == 0)
    def _() -> None:
        _spread(plan, q_ref[0].T, key_rows, q_spread)
        acc[...] = jnp.zeros_like(acc)
        top[...] = jnp.full_like(top, _LOWEST)
        total[...] = jnp.zeros_like(total)

    def compute(j: Any, allowed: Any) -> None:
        k = k_ref[0]
        v_rows[...] = v_ref[0].T
        of_keys = _tiles(plan.block_k)
        parts = [(head, at) for at in _tiles(plan.block_q) for head in range(plan.packed)]
        scores = [
            [
                _scores(plan, _dot(k[keys], q_spread[head, :, at]), allowed(keys, at))[0]
                for keys in of_keys
            ]
            for head, at in parts
        ]
        results = []
        for (head, at), tiles in zip(parts, scores, strict=True):
            row, rows = slice(head, head + 1), _rows(plan, head)
            before = now = top[row, at]
            for tile in tiles:
                now = jnp.maximum(now, tile.max(axis=0, keepdims=True))
            shrink = jnp.exp2(before - now)
            sums, summed = total[row, at] * shrink, acc[rows, at] * shrink
            keep = None if words is None else _keep(plan, words, head, j)
            for keys, tile in zip(of_keys, tiles, strict=True):
                weights = jnp.exp2(tile - now)
                sums += weights.sum(axis=0, keepdims=True)
                if keep is not None:
                    weights = jnp.where(keep[keys, at], weights, 0.0)
                summed += _dot(v_rows[key_rows[head], keys], weights.astype(k.dtype))
            results.append((now, sums, summed))
        for (head, at), result in zip(parts, results, strict=True):
            row = slice(head, head + 1)
            top[row, at], total[row, at], acc[_rows(plan, head), at] = result

    _each_block(plan, segments, compute)

    @pl.when(step == plan.grid[3] - 1)
    def _() -> None:
        has_keys = total[...] > 0.0  # a query without keys gets zeros
        sums = jnp.where(has_keys, total[...], 1.0)
        sum_ref[0, 0] = top[...] + jnp.log2(sums)
        inverse = jnp.where(has_keys, 1.0 / (sums * (1.0 - plan.spec.dropout)), 0.0)
        for head in range(plan.packed):
            acc[_rows(plan, head)] *= inverse[head : head + 1]
        out_ref[0] = acc[...].T.astype(out_ref.dtype)


def _backward_kernel(
    plan: Tiling, q_ref: Any, k_ref: Any, v_ref: Any, segments: Any, words: Any, *refs: Any
) -> None:
    out_ref, sum_ref, d_out_ref, dq_ref, dk_ref, dv_ref = refs[:6]
    q_spread, d_spread, inner, dq_sum, dk_sum, dv_sum, k_rows = refs[6:]
    c, i, step = (pl.program_id(n) for n in (2, 3, 4))
    key_rows = _key_rows(plan)

    @pl.when((c == 0) & (i == 0) & (step == 0))
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(step == 0)
    def _() -> None:
        d_out = d_out_ref[0].T
        _spread(plan, q_ref[0].T, key_rows, q_spread)
        _spread(plan, d_out, key_rows, d_spread)
        product = out_ref[0].astype(jnp.float32).T * d_out.astype(jnp.float32)
        for head in range(plan.packed):
            inner[head : head + 1] = product[_rows(plan, head)].sum(axis=0, keepdims=True)
        dq_sum[...] = jnp.zeros_like(dq_sum)

    def compute(j: Any, allowed: Any) -> None:
        k, v = k_ref[0], v_ref[0]
        k_rows[...] = k.T
        at = pl.ds(pl.multiple_of(j * plan.block_k, plan.block_k), plan.block_k)
        seen = allowed(slice(0, plan.block_k), slice(0, plan.block_q))
        for head in range(plan.packed):
            row, rows, of_keys = slice(head, head + 1), _rows(plan, head), key_rows[head]
            scores, tanh = _scores(plan, _dot(k, q_spread[head]), seen)
            weights = jnp.exp2(scores - sum_ref[0, 0, row])
            kept, d_weights = weights, _dot(v, d_spread[head])
            if words is not None:
                factor = jnp.where(_keep(plan, words, head, j), 1 / (1 - plan.spec.dropout), 0.0)
                kept, d_weights = weights * factor, d_weights * factor
            d_scores = weights * (d_weights - inner[row])
            if tanh is not None:
                d_scores = d_scores * (1.0 - tanh * tanh)
            low, kept = d_scores.astype(k.dtype), kept.astype(k.dtype)
            dv_sum[of_keys, at] += _dot(d_spread[head, of_keys, :], kept, _ROWS)
            dk_sum[of_keys, at] += _dot(q_spread[head, of_keys, :], low, _ROWS)
            dq_sum[rows] += _dot(k_rows[of_keys, :], low)

    _each_block(plan, segments, compute)

    @pl.when(step == plan.grid[3] - 1)
    def _() -> None:
        dq_ref[0] = (dq_sum[...] * plan.scale).T.astype(dq_ref.dtype)

    last = [n - 1 for n in plan.grid[1:]]

    @pl.when((c == last[0]) & (i == last[1]) & (step == last[2]))
    def _() -> None:
        def write(j: Any, _: Any) -> None:
            at = pl.ds(pl.multiple_of(j * plan.block_k, plan.block_k), plan.block_k)
            dk_ref[0, at, :] = (dk_sum[:, at] * plan.scale).T.astype(dk_ref.dtype)
            dv_ref[0, at, :] = dv_sum[:, at].T.astype(dv_ref.dtype)

        jax.lax.fori_loop(0, plan.keys // plan.block_k, write, None)
