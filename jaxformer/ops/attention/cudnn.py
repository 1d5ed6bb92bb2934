"""cuDNN's flash attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`.

That function has no argument for packed documents. The one that it calls has, but its name is
private: where a version of JAX does not have it, `gpu_flash` or `blockwise` computes them.
"""

import contextlib
import inspect
from importlib import import_module
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from jaxformer.ops.attention.blockwise import blockwise
from jaxformer.ops.attention.gpu_flash import gpu_flash
from jaxformer.ops.attention.kernel import (
    AMPERE,
    AttentionSpec,
    DeviceInfo,
    Divided,
    Kernel,
    on_mesh,
    unsupported,
)
from jaxformer.ops.masks import AttentionMask

_private: Any = None
with contextlib.suppress(ImportError):
    _private = import_module("jax._src.cudnn.fused_attention_stablehlo")
_ARGUMENTS = {"q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "mask_type", "scale"}
_takes_documents = hasattr(_private, "MaskType") and _ARGUMENTS <= set(
    inspect.signature(getattr(_private, "dot_product_attention", len)).parameters
)

_IMPLEMENTATION: Literal["cudnn", "xla"] = "cudnn"  # "xla" takes the same arguments on all devices
_HOPPER = (9, 0)
_LEAST_MEAN = 64
"""Tokens of a document on average, in each row: with shorter ones another kernel computes a call.
cuDNN keeps T numbers for each head and possible document for the backward pass."""


def attend(
    q: Array, k: Array, v: Array, mask: AttentionMask, *, scale: float, bias: Any, **options: Any
) -> Array:
    """Attention by JAX's function.

    A padding mask becomes a number of keys: without `causal` the order of the keys has no meaning,
    so the real tokens of each example move to the front.
    """
    if mask.query_segments is not None:
        return _attend_in_documents(q, k, v, mask, scale=scale, **options)
    lengths, real = None, None if mask.padding_mask is None else jnp.asarray(mask.padding_mask)
    if real is not None:
        order = jnp.argsort(~real, axis=1, stable=True)[:, :, None, None]
        k, v = (jnp.take_along_axis(x, order, axis=1) for x in (k, v))
        # At least one key, so that every softmax is finite.
        lengths = jnp.maximum(real.sum(1, dtype=jnp.int32), 1)
    bias = None if bias is None else bias.astype(q.dtype)

    def by_cudnn(q: Array, k: Array, v: Array, bias: Array | None, lengths: Array | None) -> Array:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias,
            scale=scale,
            is_causal=mask.causal,
            key_value_seq_lengths=lengths,
            local_window_size=None if mask.window is None else (mask.window - 1, 0),
            implementation=_IMPLEMENTATION,
        )

    # JAX divides its call of cuDNN itself, but fails inside a `jax.shard_map` over other axes.
    spec = AttentionSpec.create(q, k, v, mask, bias)
    axes = *[Divided()] * 3, Divided(heads=1), Divided(heads=None)
    out = on_mesh(by_cudnn, spec, axes)(q, k, v, bias, lengths)
    return out if real is None else jnp.where(real.any(1)[:, None, None, None], out, 0)


def _attend_in_documents(
    q: Array, k: Array, v: Array, mask: AttentionMask, *, scale: float, **options: Any
) -> Array:
    """Attention within documents; by another kernel where cuDNN cannot tell them apart."""
    segments: Any = mask.query_segments, mask.key_segments
    queries, keys = map(jnp.asarray, segments)
    starts, lengths, is_packed = documents(queries, q.shape[1] // _LEAST_MEAN)
    is_packed &= jnp.array_equal(queries, keys)
    kind = _private.MaskType.PADDING_CAUSAL if mask.causal else _private.MaskType.PADDING

    def packed(q: Array, k: Array, v: Array, starts: Array, lengths: Array) -> Array:
        offsets = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
        return _private.dot_product_attention(
            q,
            k,
            v,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=offsets,
            kv_offsets=offsets,
            scale=scale,
            mask_type=kind,
        )

    spec = AttentionSpec.create(q, k, v, mask, **options)
    axes = *[Divided()] * 3, *[Divided(heads=None)] * 2

    def by_cudnn(q: Array, k: Array, v: Array) -> Array:
        return on_mesh(packed, spec, axes)(q, k, v, starts, lengths)

    @jax.checkpoint  # keeps nothing for a backward pass that hardly ever comes
    def other(q: Array, k: Array, v: Array) -> Array:
        if gpu_flash.reasons(spec, DeviceInfo.current()):
            return blockwise(q, k, v, mask, scale=scale, **options)
        return gpu_flash.compute(q, k, v, mask, scale=scale, **options)

    return jax.lax.cond(is_packed, by_cudnn, other, q, k, v)


def documents(
    segments: Int[Array, "B T"], most: int
) -> tuple[Int[Array, "B M"], Int[Array, "B M"], Bool[Array, ""]]:
    """Start and length of each of at most `most` runs of equal `segments` in a row; -1 where a row
    has no more.

    And whether no row has more of them, or one segment in two runs.
    """
    batch, length = segments.shape
    changes = segments[:, 1:] != segments[:, :-1]
    number = jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1)  # of the run of each token
    runs = number[:, -1] + 1
    lengths = jnp.zeros((batch, most), jnp.int32).at[jnp.arange(batch)[:, None], number].add(1)
    starts = jnp.cumsum(lengths, axis=1) - lengths
    in_order = jnp.sort(segments, axis=1)
    distinct = 1 + jnp.sum(in_order[:, 1:] != in_order[:, :-1], axis=1)
    there = lengths > 0
    is_packed = jnp.all((runs <= most) & (runs == distinct))
    return jnp.where(there, starts, -1), jnp.where(there, lengths, -1), is_packed


def _reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    lacks = "dropout", "softcap", "explicit"
    reasons = unsupported(spec, ("bfloat16", "float16"), lacks)
    if spec.value_size != spec.key_size:
        sizes = f"{spec.key_size} and {spec.value_size}"
        reasons.append(f"needs values as large as keys, not {sizes}")
    is_hopper = (device.capability or ()) >= _HOPPER
    if spec.segments:
        reasons += _reasons_for_documents(spec, is_hopper)
    most = 256 if is_hopper else 128
    if spec.key_size > most or spec.key_size % 8:
        reasons.append(
            f"needs a head_dim that is a multiple of 8 and at most {most} on this device, not "
            f"{spec.key_size}"
        )
    if spec.causal and (spec.offset != 0 or spec.queries != spec.keys):
        reasons.append("supports causal masks only for T = S and offset=0")
    if spec.causal and spec.padding_mask:
        reasons.append(
            "does not support padding_mask with causal=True (leave out padding_mask where all "
            "padding is at the end, which no earlier query sees)"
        )
    if spec.bias and (spec.queries % 2 or spec.keys % 2):
        reasons.append("supports a bias only for even lengths (pad them)")
    if spec.bias and spec.padding_mask:
        reasons.append(
            "does not support a bias with padding_mask, because the keys move to the front and the "
            "bias does not"
        )
    return reasons


def _reasons_for_documents(spec: AttentionSpec, is_hopper: bool) -> list[str]:
    reasons = []
    if not (_takes_documents and is_hopper):
        reasons.append("supports segments only on Hopper GPUs and later, with a JAX that has them")
    if spec.window is not None or spec.bias or spec.padding_mask:
        reasons.append("does not support segments with a window, a bias or padding_mask")
    if spec.queries != spec.keys or spec.queries < 2 * _LEAST_MEAN:
        reasons.append(f"supports segments only for T = S of {2 * _LEAST_MEAN} or more")
    return reasons


cudnn: Kernel = Kernel(
    "cudnn",
    attend,
    _reasons,
    DeviceInfo("gpu", "", AMPERE),
    least_queries=16,  # with few, putting the keys of a padded source in order takes longest
)
"""Attention by `jax.nn.dot_product_attention(implementation="cudnn")`.

cuDNN gets the attributes of the mask. It never gets a matrix, which it would add as a bias [T, S].
A bias is rounded to the dtype of the queries. Where segments are not runs of 64 tokens on average,
`gpu_flash` computes the call, or `blockwise` where that cannot; the batch decides which of the two
runs, not its shape.
"""
