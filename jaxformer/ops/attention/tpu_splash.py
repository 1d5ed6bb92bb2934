"""Splash attention on TPUs, the Pallas implementation that comes with JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer.ops.attention.spec import (
    FLASH_RESIDUALS,
    AttentionSpec,
    Call,
    DeviceFunction,
    DeviceInfo,
    on_mesh,
)
from jaxformer.ops.masks import AttentionMask

_LANES = 128  # of a TPU's vector unit: the smallest block of queries or keys


def _compute(call: Call) -> Array:
    spec, mask = call.spec, call.mask
    # The scale goes into the queries, in float32: splash attention has no argument for it.
    q = (call.q.astype(jnp.float32) * call.scale).astype(call.q.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, call.k, call.v))

    def attend(q: Array, k: Array, v: Array, segments: Any) -> Array:
        return jax.vmap(_splash_for_one_example(call, q.shape[1]))(q, k, v, segments)

    attend = on_mesh(attend, spec, (1, 1, 1, None), 1)
    out = jnp.swapaxes(attend(q, k, v, segment_ids(mask, spec)), 1, 2)
    allowed = mask.materialize(spec.queries, spec.keys)
    if allowed is None or each_query_has_a_key(mask, spec):
        return out
    has_key = jnp.moveaxis(allowed.any(-1), 1, 2)  # [B, T, 1]
    return jnp.where(has_key[..., None], out, 0)


def each_query_has_a_key(mask: AttentionMask, spec: AttentionSpec) -> bool:
    """Whether the attributes of the mask, without its arrays, give each query a key."""
    if spec.padding_mask or (spec.segments and mask.query_segments is not mask.key_segments):
        return False
    if not spec.causal:
        return not spec.segments or spec.queries == spec.keys
    offset = spec.offset or 0
    if spec.segments:
        return offset == 0 and spec.queries == spec.keys
    last = offset + spec.queries - 1  # the position of the last query among the keys
    return offset >= 0 and (spec.window is None or last - spec.window + 1 < spec.keys)


def _splash_for_one_example(call: Call, heads: int) -> Any:
    """Splash attention of one example with `heads` of the spec's heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    spec = call.spec
    shape, offset = (spec.queries, spec.keys), spec.offset or 0
    if not spec.causal:
        one_head: Any = splash.FullMask(shape)
    elif spec.window is None:
        one_head = splash.CausalMask(shape, offset)
    else:
        one_head = splash.LocalMask(shape, (spec.window - 1, 0), offset)
    q, kv = (block_size(length, call.device) for length in shape)
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([one_head] * heads),
        block_sizes=splash.BlockSizes(
            block_q=q,
            block_kv=kv,
            block_q_dkv=q,
            block_kv_dkv=kv,
            block_q_dq=q,
            block_kv_dq=kv,
        ),
        attn_logits_soft_cap=spec.softcap,
        interpret=call.interpret,
        residual_checkpoint_name=FLASH_RESIDUALS,
    )


def block_size(length: int, device: DeviceInfo) -> int:
    """The block of queries or keys for sequences of `length`, a divisor of it.

    Published TPU configurations use 512 (MaxText, Levanter) and 1,024 on v6e (axlearn). Not
    measured here.
    """
    largest = 1024 if "v6" in device.kind else 512
    return next(size for size in (1024, 512, 256, _LANES) if size <= largest and not length % size)


def segment_ids(mask: AttentionMask, spec: AttentionSpec) -> Any:
    """The segments [B, T] and [B, S] of `mask`, padding as one of its own; None without any."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    query, key = mask.query_segments, mask.key_segments
    if mask.padding_mask is None:
        return None if query is None else splash.SegmentIds(*map(jnp.int32, (query, key)))
    query = jnp.zeros((spec.batch, spec.queries), jnp.int32) if query is None else jnp.int32(query)
    key = jnp.zeros((spec.batch, spec.keys), jnp.int32) if key is None else jnp.int32(key)
    return splash.SegmentIds(query, jnp.where(mask.padding_mask, key, jnp.iinfo(jnp.int32).min))


def splash_limits(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    """Why splash attention does not support the lengths of `spec`."""
    if spec.queries % _LANES or spec.keys % _LANES:
        return [f"needs lengths that are multiples of {_LANES} (pad them)"]
    return []


tpu_splash: DeviceFunction = DeviceFunction(
    "tpu_splash",
    DeviceInfo("tpu"),
    _compute,
    dtypes=("float32", "bfloat16"),
    lacks=("dropout", "explicit", "bias", "cached"),
    limits=splash_limits,
    least_queries=_LANES,
)
"""Attention by `jax.experimental.pallas.ops.tpu.splash_attention`.

Causal masks and windows skip the blocks in which no query sees a key. Padding becomes a segment to
which no query belongs, so no segment may have the number -2^31. On a mesh whose axis "tensor"
divides the heads, each device computes its own heads, through `jax.shard_map`.
"""
