"""Attention to a cache on TPUs: each row reads only the blocks of keys that it has written.

A step of decoding has few queries, so that it takes as long as reading keys and values. XLA reads
the whole cache, and keeps the scores of all keys between two products. Here a block of keys and
values is read once, and its scores stay on the chip (Dao et al. 2022, with one block of queries).
"""

import math
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int, Int8

from jaxformer.ops.attention.kernel import AttentionSpec, DeviceInfo, Kernel, unsupported
from jaxformer.ops.attention.reference import reference
from jaxformer.ops.manual_axes import shape_like
from jaxformer.ops.masks import MASKED_LOGIT, AttentionMask
from jaxformer.ops.partitioning import HEAD_AXES, partitioned
from jaxformer.ops.rows_and_heads import map_rows_and_heads
from jaxformer.ops.tpu_tiles import LANES, has_positions_in_lanes, heads_at_once

_MOST_ROWS = 64
"""The most queries of a head of keys: their scores of a block of keys lie on the chip."""
_BLOCK_BYTES = 2**20
"""The most bytes of keys that a step of the kernel reads, beside as many of values."""
_BLOCK_KEYS = 1024
"""The most positions of a block: of a larger one a text would read more that it has not written."""
_TOGETHER = 8
"""The most heads that are computed side by side."""
_LOWEST = MASKED_LOGIT / 2
"""A score above masked ones, so that their weights are 0."""


class Scores(NamedTuple):
    """How the kernel makes scores of products; of R = (N / K) x T rows, row r is query r % T."""

    queries: int
    """T."""
    scale: float
    softcap: float | None = None
    causal: bool = True
    window: int | None = None


class _Call(NamedTuple):
    """Static arguments: a step computes `heads` heads, and `keys` of their `length` positions.

    Positions of values are the lanes where `is_in_lanes`.
    """

    scores: Scores
    length: int
    heads: int
    keys: int
    is_in_lanes: bool


def _compute(
    q: Array,
    k: Array,
    v: Array,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float | None = None,
    bias: None = None,
    dropout: None = None,
) -> Array:
    batch, queries, heads, size = q.shape
    groups = k.shape[2]
    offset = jnp.broadcast_to(jnp.asarray(mask.offset, jnp.int32), (batch,))
    how = Scores(queries, scale, softcap, mask.causal, mask.window)
    interpret = DeviceInfo.current().platform != "tpu"

    @jax.custom_jvp
    def attend(q: Array, k: Array, v: Array, offset: Array, explicit: Array | None) -> Array:
        rows = jnp.swapaxes(q, 1, 2).reshape(batch, groups, -1, size)
        key, value = k.transpose(0, 2, 3, 1), jnp.swapaxes(v, 1, 2)  # as a cache has them
        arrays = [rows, key, value, offset]
        if explicit is not None:
            explicit = jnp.tile(explicit.astype(jnp.int8)[:, None], (1, 1, heads // groups, 1))
            arrays.append(explicit)
        out = map_rows_and_heads(partial(attend_to_cache, how, interpret=interpret), arrays)
        return jnp.swapaxes(out.reshape(batch, heads, queries, -1), 1, 2)

    @attend.defjvp
    def attend_jvp(primals: Any, tangents: Any) -> Any:
        *_, offset, explicit = primals
        seen = AttentionMask(
            causal=mask.causal, window=mask.window, offset=offset, explicit=explicit
        )

        def attend_plainly(q: Array, k: Array, v: Array) -> Array:
            return reference(q, k, v, seen, scale=scale, softcap=softcap)

        tangent = jax.jvp(attend_plainly, primals[:3], tangents[:3])[1]
        return attend(*primals), tangent

    explicit = mask.explicit
    if explicit is not None:
        explicit = jnp.broadcast_to(explicit, (batch, queries, k.shape[1]))
    return attend(q, k, v, offset, explicit)


@partial(jax.jit, static_argnums=0, static_argnames="interpret")  # traced once for all layers
def attend_to_cache(
    how: Scores,
    q: Float[Array, "B K R H"],
    key: Float[Array, "B K H S"],
    value: Float[Array, "B K S Hv"],
    offset: Int[Array, " B"],
    explicit: Int8[Array, "B 1 R S"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B K R Hv"]:
    """Attention of the R rows of each head of keys.

    If causal, query t of a row of the batch has the position `offset` + t and sees no key after it,
    of a window only the last ones. `explicit` is 1 where a row may see a key. Positions of values
    lie in the lanes, as positions of keys do, where heads do not fill the lanes: `write_rows` keeps
    them so.
    """
    (batch, heads, size, length), value_size = key.shape, value.shape[3]
    column_bytes = max(size, value_size) * key.dtype.itemsize
    at_once = heads_at_once(heads, column_bytes, _BLOCK_BYTES)
    keys = _keys_at_once(length, at_once * column_bytes)
    call = _Call(how, length, at_once, keys, has_positions_in_lanes(value_size))
    if call.is_in_lanes:
        value = jnp.swapaxes(value, 2, 3)
    blocks = pl.cdiv(length, keys)

    def block_of_step(row: Array, step: Array, offset: Any) -> Array:
        first, last = _blocks_of_row(call, offset[row])
        return jnp.minimum(first + step, last)

    def spec_of_rows(width: int) -> pl.BlockSpec:
        shape = (1, at_once, q.shape[2], width)
        return pl.BlockSpec(shape, lambda row, group, step, offset: (row, group, 0, 0))

    def spec_of_lanes(heads: int, rows: int) -> pl.BlockSpec:
        """Blocks of an array [B, K or 1, rows, S]."""

        def index(row: Array, group: Array, step: Array, offset: Any) -> tuple[Any, ...]:
            return row, group if heads > 1 else 0, 0, block_of_step(row, step, offset)

        return pl.BlockSpec((1, heads, rows, keys), index)

    def spec_of_positions(width: int) -> pl.BlockSpec:
        """Blocks of an array [B, K, S, width]."""

        def index(row: Array, group: Array, step: Array, offset: Any) -> tuple[Any, ...]:
            return row, group, block_of_step(row, step, offset), 0

        return pl.BlockSpec((1, at_once, keys, width), index)

    statistics = pltpu.VMEM((at_once, q.shape[2], LANES), jnp.float32)
    return pl.pallas_call(
        partial(_kernel, call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads // at_once, blocks),
            in_specs=[
                spec_of_rows(size),
                spec_of_lanes(at_once, size),
                spec_of_lanes(at_once, value_size)
                if call.is_in_lanes
                else spec_of_positions(value_size),
                None if explicit is None else spec_of_lanes(1, q.shape[2]),
            ],
            out_specs=spec_of_rows(value_size),
            scratch_shapes=[
                statistics,
                statistics,
                pltpu.VMEM((at_once, q.shape[2], value_size), jnp.float32),
            ],
        ),
        out_shape=shape_like(q, (*q.shape[:3], value_size), value.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="tpu_decode",
    )(offset, q, key, value, explicit)


def _keys_at_once(length: int, position_bytes: int) -> int:
    """The number of positions of a block: all, or a multiple of 128 that divides them if any."""
    most = max(LANES, min(_BLOCK_KEYS, _BLOCK_BYTES // position_bytes // LANES * LANES))
    if length <= most:
        return length
    dividing = [count for count in range(LANES, most + 1, LANES) if length % count == 0]
    return max(dividing, default=most)


def _blocks_of_row(call: _Call, offset: Array) -> tuple[Array, Array]:
    """The first and the last block of keys that a row's queries may see."""
    how, keys = call.scores, jnp.int32(call.keys)
    last = jnp.int32(pl.cdiv(call.length, call.keys) - 1)
    if not how.causal:
        return jnp.int32(0), last
    last = jnp.minimum(jax.lax.div(offset + jnp.int32(how.queries - 1), keys), last)
    if how.window is None:
        return jnp.int32(0), last
    oldest = jnp.maximum(offset - jnp.int32(how.window - 1), jnp.int32(0))
    return jnp.minimum(jax.lax.div(oldest, keys), last), last


def _kernel(
    call: _Call,
    offset_ref: Any,
    q_ref: Any,
    key_ref: Any,
    value_ref: Any,
    explicit_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
) -> None:
    """A block of keys of a row. `top_ref` has the largest scores so far, `total_ref` the sums of
    weights, each in all lanes; scores are in units of log(2), as a TPU has an instruction for 2^x.
    """
    step, steps = pl.program_id(2), pl.num_programs(2)
    offset = offset_ref[pl.program_id(0)]
    first, last = _blocks_of_row(call, offset)
    block = first + step
    is_cut = call.length % call.keys > 0  # the last block has what lies after the cache
    left = jnp.int32(call.length) - block * jnp.int32(call.keys)

    @pl.when(step == 0)
    def _() -> None:
        top_ref[...] = jnp.full_like(top_ref, _LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def allowed() -> Array | None:
        """The keys [R, keys] of the block that each row may see; None: all."""
        shape = q_ref.shape[2], call.keys
        place = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        parts = []
        if call.scores.causal:
            row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
            query = jax.lax.rem(row, jnp.int32(call.scores.queries)) + offset
            distance = query - block * jnp.int32(call.keys) - place
            parts.append(distance >= 0)
            if call.scores.window is not None:
                parts.append(distance < call.scores.window)
        if explicit_ref is not None:
            parts.append(explicit_ref[0, 0].astype(jnp.int32) > 0)
        if is_cut:
            parts.append(place < left)
        return reduce(jnp.logical_and, parts) if parts else None

    def attend(heads: list[Any]) -> None:
        # Nothing is written before all is computed: the compiler then multiplies one head while it
        # computes the weights of another.
        seen = allowed()
        products = [_dot(q_ref[0, head], key_ref[0, head], 0) for head in heads]
        results = []
        for head, product in zip(heads, products, strict=True):
            scores = _scores(call.scores, product)
            if seen is not None:
                scores = jnp.where(seen, scores, MASKED_LOGIT)
            before = top_ref[head, :, :1]
            now = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            weights, shrink = jnp.exp2(scores - now), jnp.exp2(before - now)
            total = total_ref[head, :, :1] * shrink + weights.sum(axis=1, keepdims=True)
            value = value_ref[0, head]
            if is_cut:
                value = _zeros_from(left, value, int(call.is_in_lanes))
            out = _dot(weights.astype(value.dtype), value, int(call.is_in_lanes))
            results.append((now, total, sum_ref[head] * shrink + out))
        for head, (now, total, out) in zip(heads, results, strict=True):
            top_ref[head] = jnp.broadcast_to(now, top_ref.shape[1:])
            total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])
            sum_ref[head] = out

    @pl.when(block <= last)
    def _() -> None:
        together = max(n for n in range(1, _TOGETHER + 1) if call.heads % n == 0)

        def attend_next(group: Any, carry: None) -> None:
            attend([group * together + head for head in range(together)])

        if together == call.heads:
            attend(list(range(together)))
        else:
            jax.lax.fori_loop(0, call.heads // together, attend_next, None)

    @pl.when(step == steps - 1)
    def _() -> None:
        total = total_ref[:, :, :1]
        inverse = jnp.where(total > 0, 1 / total, 0)  # a row without keys gets zeros
        out_ref[0] = (sum_ref[...] * inverse).astype(out_ref.dtype)


def _scores(how: Scores, products: Array) -> Array:
    if how.softcap is None:
        return products * (how.scale / math.log(2))
    return jnp.tanh(products * (how.scale / how.softcap)) * (how.softcap / math.log(2))


def _dot(a: Array, b: Array, axis: int) -> Float[Array, "R _"]:
    """The product of a [R, I] with the axis of b that has I numbers."""
    axes = ((1,), (axis,)), ((), ())
    return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _zeros_from(place: Array, x: Array, axis: int) -> Array:
    """`x` with zeros from `place` on along `axis`."""
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < place, x, 0)


def _reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    if not spec.from_cache:
        return ["computes calls with a cache alone"]
    lacks = "segments", "bias", "dropout"
    reasons = unsupported(spec, ("float32", "bfloat16"), lacks)
    if spec.padding_mask:
        reasons.append("does not support a padding mask")
    rows = spec.heads // spec.kv_heads * spec.queries
    if rows > _MOST_ROWS:
        reasons.append(f"needs at most {_MOST_ROWS} queries for a head of keys, not {rows}")
    axes = {name: parts for name, parts in partitioned(HEAD_AXES).items() if parts > 1}
    if spec.kv_heads % math.prod(axes.values()):
        named = " x ".join(f"{name}={parts}" for name, parts in axes.items())
        reasons.append(f"needs heads of keys that {named} divides, not {spec.kv_heads}")
    return reasons


tpu_decode: Kernel = Kernel("tpu_decode", _compute, _reasons, DeviceInfo("tpu"))
"""Attention of few queries to a cache by a Pallas kernel for TPUs.

Rows may have positions of their own, and a sentence the queries of several beams. Blocks of keys in
which no query sees a key by causality or window are neither read nor computed.
"""
