"""Flash attention on TPUs that reads and writes heads side by side, without another layout."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxformer.ops.attention.kernel import (
    FLASH_RESIDUALS,
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
from jaxformer.ops.attention.tpu_blocks import SUBLANES, Tiling, chip_memory
from jaxformer.ops.attention.tpu_kernels import backward, forward
from jaxformer.ops.masks import AttentionMask
from jaxformer.ops.padding import pad_to
from jaxformer.ops.tpu_tiles import LANES

_BLOCKS = 512, 256, LANES  # of queries and of keys
_PADDED_FROM = 512  # at most a fifth of a longer one is padding


def plan_of(
    spec: AttentionSpec, device: DeviceInfo, scale: float, interpret: bool = False
) -> Tiling:
    """The plan of a device's part of a call, with the largest blocks that its memory can hold."""
    spec = part_of_device(spec)
    for most in _BLOCKS:
        (queries, block_q), (keys, block_k) = (
            _blocks(length, most) for length in (spec.queries, spec.keys)
        )
        plan = Tiling(
            spec,
            queries=queries,
            keys=keys,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=_head_lanes(max(spec.key_size, spec.value_size)),
            block_q=block_q,
            block_k=block_k,
            scale=scale,
            interpret=interpret,
            memory=chip_memory(device.kind),
        )
        if _fits(plan._replace(keys=block_k), spec.dtype):
            break
    return plan


def _fits(plan: Tiling, dtype: Any) -> bool:
    return plan.needed_memory(jnp.dtype(dtype).itemsize) <= plan.memory


def _blocks(length: int, most: int) -> tuple[int, int]:
    """The length with its padding, an eighth of it at most, and the length of a block."""
    for block in _BLOCKS:
        padded = -(-length // block) * block
        if block <= most and 8 * (padded - length) <= length:
            return padded, block
    return -(-length // LANES) * LANES, LANES


def _head_lanes(size: int) -> int:
    """Lanes per head: a power of two up to 128, above it a multiple of 128."""
    if size > LANES:
        return -(-size // LANES) * LANES
    return max(16, 2 ** math.ceil(math.log2(size)))


def _compute(
    q: Array, k: Array, v: Array, mask: AttentionMask, *, scale: float, **options: Any
) -> Array:
    spec, device = AttentionSpec.create(q, k, v, mask, **options), DeviceInfo.current()
    plan = plan_of(spec, device, scale, interpret=device.platform != "tpu")
    axes = *[Divided()] * 3, Divided(heads=None), Divided(rows=1)
    attend = on_mesh(partial(_attend_padded, plan), spec, axes)
    segments = segments_of(mask, spec) if spec.segments or spec.padding_mask else None
    return attend(q, k, v, segments, row_words(options["dropout"], spec))


def _attend_padded(plan: Tiling, q: Array, k: Array, v: Array, segments: Any, words: Any) -> Array:
    """Attention [B, T, N, Hv] of the heads of one device."""
    groups = plan.key_groups * plan.share
    flat = (
        _flatten(plan, x, length, count * plan.packed)
        for x, length, count in (
            (q, plan.queries, groups),
            (k, plan.keys, plan.key_groups),
            (v, plan.keys, plan.key_groups),
        )
    )
    if segments is not None:
        lengths = plan.queries, plan.keys
        segments = [pad_to(x, 1, n) for x, n in zip(segments, lengths, strict=True)]
    if words is not None:  # row h of 16 is the first word of head h of a group, 8 + h its second
        words = pad_to(pad_to(words, 2, groups * plan.packed), 3, plan.queries)
        words = words.reshape(2, q.shape[0], groups, plan.packed, plan.queries)
        words = jnp.moveaxis(pad_to(words, 3, SUBLANES), 0, 2)
        words = words.reshape(q.shape[0], groups, 2 * SUBLANES, plan.queries)
    out: Any = _attend(plan, *flat, segments, words)
    out = out.reshape(*out.shape[:2], -1, plan.head_dim)
    return out[:, : q.shape[1], : q.shape[2], : v.shape[3]]


def _flatten(plan: Tiling, x: Array, length: int, heads: int) -> Array:
    """`x` [B, L, N, H] as [B, length, heads * head_dim], with zeros in what it lacks."""
    x = pad_to(x, 3, plan.head_dim)
    x = x.reshape(*x.shape[:2], -1)
    return pad_to(pad_to(x, 1, length), 2, heads * plan.head_dim)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Tiling, q: Array, k: Array, v: Array, segments: Any, words: Any) -> Array:
    return forward(plan, q, k, v, segments, words)[0]


def _attend_forward(plan: Tiling, q: Array, k: Array, v: Array, segments: Any, words: Any) -> Any:
    out, log_sum = checkpoint_name(forward(plan, q, k, v, segments, words), FLASH_RESIDUALS)
    return out, (q, k, v, segments, words, out, log_sum)


def _attend_backward(plan: Tiling, saved: Any, d_out: Array) -> Any:
    q, k, v, segments, words, out, log_sum = saved
    most = plan.keys
    while most > plan.block_k and not _fits(plan._replace(keys=most), k.dtype):
        most = -(-most // (2 * plan.block_k)) * plan.block_k
    parts = []
    for first in range(0, plan.keys, most):
        part = slice(first, min(first + most, plan.keys))
        of_keys = plan._replace(keys=part.stop - first, first_key=first)
        segments_of_part = None
        if segments is not None:
            segments_of_part = segments[0], segments[1][:, part]
        inputs = q, k[:, part], v[:, part], segments_of_part, words
        dtype = q.dtype if most == plan.keys else jnp.float32  # of a sum
        parts.append(backward(of_keys, *inputs, out, log_sum, d_out, dtype))
    dq, dk, dv = zip(*parts, strict=True)
    total: Any = sum(dq)
    return total.astype(q.dtype), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    lacks = "explicit", "bias", "has_traced_offset"
    reasons = unsupported(spec, ("float32", "bfloat16"), lacks)
    reasons += [
        f"needs lengths from {_PADDED_FROM} on, or multiples of {LANES}, not {length}"
        for length in (spec.queries, spec.keys)
        if length % LANES and length < _PADDED_FROM
    ]
    plan = plan_of(spec, device, 1.0)
    if not _fits(plan._replace(keys=plan.block_k), spec.dtype):
        reasons.append(f"needs more memory on the chip for heads of {plan.head_dim}")
    return reasons


tpu_flash: Kernel = Kernel("tpu_flash", _compute, _reasons, DeviceInfo("tpu"), LANES)
"""Attention by a Pallas kernel for TPUs.

Heads lie side by side in the lanes, as the projections give them: [B, T, N * H]. A block holds the
lanes of one head, or of as many heads as fit into 128 lanes; heads of other sizes, and other
numbers of heads, are padded with zeros. Heads of queries that share a head of keys read its block.
One kernel computes the three gradients, and each kernel computes the mask of `DropoutRng.keep_mask`
again. Lengths from 512 on are padded. Blocks in which no query sees a key by causality or window
are neither read nor computed; padding is a segment, so no segment may have the number -2^31.
"""
