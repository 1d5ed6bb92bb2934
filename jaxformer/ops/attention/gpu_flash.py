"""Flash attention for NVIDIA GPUs, written in Pallas and compiled by Triton.

It exists beside `cudnn` for what cuDNN's function in JAX does not support: packed documents,
dropout, and calls that attend to a cache. JAX 0.12 warns that a later version will remove Pallas'
Triton backend.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Bool, Float, Int32

from jaxformer.ops.attention.gpu_flash_kernels import (
    Inputs,
    MaskArrays,
    Plan,
    call_kernel,
    forward,
    key_value_gradient,
    output_like,
    query_gradient,
)
from jaxformer.ops.attention.spec import (
    AMPERE,
    FLASH_RESIDUALS,
    AttentionSpec,
    DeviceInfo,
    ampere_reasons,
    on_mesh,
    raise_unsupported,
    softcap_reasons,
)
from jaxformer.ops.dropout import Dropout
from jaxformer.ops.masks import AttentionMask

_SMALLEST = 16  # the least rows and columns of a product on tensor cores
_PADDING = np.iinfo(np.int32).min  # the segment of padding keys, to which no query belongs


def gpu_flash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: Dropout | None = None,
    softcap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N Hv"]:
    """Attention by three kernels: forward, the gradient of `q`, the gradients of `k` and `v`.

    The algorithm is that of Dao 2023 (FlashAttention-2). The weights [T, S] are never stored. For
    each long block the kernels visit the range of short blocks that `causal`, `window`, `offset`,
    padding and segments allow, so that packed documents take the time of their own lengths. Each
    kernel computes the mask of `DropoutRng.keep_mask` again. Padding becomes a segment to
    which no query belongs, so no segment may have the number -2^31. Products of float32 have the
    precision of `jax.default_matmul_precision`: TF32 unless set. `interpret` runs the kernels on
    any device, slowly, for tests.

    Raises `ConfigError` for what it does not support; `gpu_flash_unsupported_reasons` lists it.

    >>> from jaxformer.ops.attention import AttentionSpec, DeviceInfo, select
    >>> h100 = DeviceInfo("gpu", "NVIDIA H100", (9, 0))
    >>> sizes = {"heads": 12, "kv_heads": 12, "key_size": 64, "value_size": 64, "causal": True}
    >>> call = AttentionSpec(batch=8, queries=1024, keys=1024, dtype="float32", **sizes)
    >>> select(call, h100).name  # cuDNN does not support float32
    'gpu_flash'
    """
    spec = AttentionSpec.create(q, k, v, mask, bias, dropout, softcap)
    device = DeviceInfo("gpu", "", AMPERE) if interpret else DeviceInfo.current()
    raise_unsupported("gpu_flash", gpu_flash_unsupported_reasons(spec, device))
    plan = make_plan(spec, scale, interpret)
    attend = on_mesh(partial(_attend, plan), spec, (2, 2, 2, None, 2), 2)
    words = None
    if spec.dropout and dropout is not None and dropout.dropout_rng is not None:
        rows = q.shape[0], q.shape[2], q.shape[1]
        words = dropout.dropout_rng.row_words(dropout.name, rows)
        words = _pad(words, 3, plan.queries)
    q, k, v = (_pad(x, 3, _power_of_two(x.shape[3])) for x in (q, k, v))
    q, k, v = _pad(q, 1, plan.queries), _pad(k, 1, plan.keys), _pad(v, 1, plan.keys)
    out = attend(q, k, v, make_mask_arrays(plan, mask, spec), words)
    return out[:, : spec.queries, :, : spec.value_size]


def gpu_flash_unsupported_reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    """Why `gpu_flash` cannot compute `spec` on `device`; empty where it can."""
    if ampere_reasons(device):
        return ampere_reasons(device)
    reasons = softcap_reasons(spec)
    if spec.bias:
        reasons.append("does not support a bias on the logits")
    if spec.dtype not in ("bfloat16", "float16", "float32"):
        reasons.append(f"supports bfloat16, float16 and float32, but {spec.dtype} was given")
    if max(spec.key_size, spec.value_size) > 128:
        reasons.append(
            f"supports a head_dim of at most 128, but head_dim={spec.key_size} and "
            f"value_head_dim={spec.value_size} were given"
        )
    return reasons


def make_plan(spec: AttentionSpec, scale: float, interpret: bool) -> Plan:
    """The plan of a call, with the lengths padded to whole blocks."""
    lengths = spec.queries, spec.keys
    # Blocks of FlashAttention-2's Triton tutorial, not measured here.
    longest, shortest = (64, 32) if spec.dtype == "float32" else (128, 32)
    long = tuple(min(longest, _power_of_two(length)) for length in lengths)
    short = tuple(min(shortest, _power_of_two(length)) for length in lengths)
    queries, keys = (-(-length // size) * size for length, size in zip(lengths, long, strict=True))
    return Plan(
        queries=queries,
        keys=keys,
        group=spec.heads // spec.kv_heads,
        scale=scale,
        causal=spec.causal,
        window=spec.window,
        rate=spec.dropout,
        long=(long[0], long[1]),
        short=(short[0], short[1]),
        interpret=interpret,
    )


def make_mask_arrays(plan: Plan, mask: AttentionMask, spec: AttentionSpec) -> MaskArrays:
    """The arrays of `mask`; padding keys get a segment of their own."""
    offset = jnp.asarray(mask.offset, jnp.int32).reshape(1)
    explicit = None
    if mask.explicit is not None:
        explicit = jnp.broadcast_to(mask.explicit, (spec.batch, spec.queries, spec.keys))
        explicit = _pad(_pad(explicit.astype(jnp.int8), 1, plan.queries), 2, plan.keys)
    query, key = mask.query_segments, mask.key_segments
    if query is None and mask.padding_mask is None and plan.keys == spec.keys:
        return MaskArrays(offset, None, None, explicit)
    if query is None or key is None:
        query = jnp.zeros((spec.batch, spec.queries), jnp.int32)
        key = jnp.zeros((spec.batch, spec.keys), jnp.int32)
    query = jnp.broadcast_to(jnp.asarray(query, jnp.int32), (spec.batch, spec.queries))
    key = jnp.broadcast_to(jnp.asarray(key, jnp.int32), (spec.batch, spec.keys))
    if mask.padding_mask is not None:
        key = jnp.where(mask.padding_mask, key, _PADDING)
    # Padding queries get the last query's segment, which adds no block of keys to visit.
    padding = plan.queries - spec.queries
    query = jnp.pad(query, ((0, 0), (0, padding)), mode="edge")
    padding = plan.keys - spec.keys
    key = jnp.pad(key, ((0, 0), (0, padding)), constant_values=_PADDING)
    return MaskArrays(offset, query, key, explicit)


def _visible(plan: Plan, arrays: MaskArrays, sizes: tuple[int, int]) -> Bool[Array, "#B Q K"]:
    """The pairs of blocks to visit: all in which a query sees a key, and perhaps some others."""
    queries, keys = sizes
    first_query = arrays.offset[0] + jnp.arange(0, plan.queries, queries)[:, None]
    first_key = jnp.arange(0, plan.keys, keys)[None, :]
    seen = jnp.ones((first_query.size, first_key.size), bool)
    if plan.causal:
        seen &= first_key < first_query + queries
    if plan.window is not None:
        seen &= first_key + keys > first_query - plan.window + 1
    if arrays.query_segments is None or arrays.key_segments is None:
        return seen[None]
    query = arrays.query_segments.reshape(-1, first_query.size, queries, 1)
    key = arrays.key_segments.reshape(-1, 1, first_key.size, keys)
    lowest_key = jnp.where(key == _PADDING, np.iinfo(np.int32).max, key).min(3)
    return seen[None] & (query.min(2) <= key.max(3)) & (lowest_key <= query.max(2))


def _bounds(visible: Bool[Array, "#B Q K"], batch: int) -> Int32[Array, "B Q 2"]:
    """The first block to visit for each of Q blocks, and the one after the last."""
    first = jnp.argmax(visible, 2)
    end = jnp.where(visible.any(2), visible.shape[2] - jnp.argmax(visible[:, :, ::-1], 2), 0)
    bounds = jnp.stack([jnp.minimum(first, end), end], 2).astype(jnp.int32)
    return jnp.broadcast_to(bounds, (batch, *bounds.shape[1:]))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, arrays: MaskArrays, words: Any) -> Array:
    return _forward(plan, q, k, v, arrays, words)[0]


def _forward(plan: Plan, q: Array, k: Array, v: Array, arrays: MaskArrays, words: Any):
    """Attention, and what the backward pass needs."""
    batch, queries, heads, _ = q.shape
    visible = _visible(plan, arrays, (plan.long[0], plan.short[1]))
    inputs = Inputs(_bounds(visible, batch), q, k, v, arrays, words)
    out = jax.ShapeDtypeStruct((batch, queries, heads, v.shape[3]), v.dtype)
    log_sum = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    of_block = pl.BlockSpec((None, None, plan.long[0]), lambda i, b, n: (b, n, i))
    outputs = [output_like(out, plan.long[0]), (log_sum, of_block)]
    computed = call_kernel(plan, forward, inputs, 1, outputs)
    out, log_sum = checkpoint_name(computed, FLASH_RESIDUALS)
    return out, (q, k, v, arrays, words, out, log_sum)


def _backward(plan: Plan, saved: Any, d_out: Array):
    """The gradients of q, k and v from the gradient `d_out` [B, T, N, Hv] of the result."""
    q, k, v, arrays, words, out, log_sum = saved
    inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), 3).swapaxes(1, 2)
    batch, (long_q, long_k), (short_q, short_k) = q.shape[0], plan.long, plan.short
    bounds = _bounds(_visible(plan, arrays, (long_q, short_k)), batch)
    inputs = Inputs(bounds, q, k, v, arrays, words, d_out.astype(v.dtype), log_sum, inner)
    (dq,) = call_kernel(plan, query_gradient, inputs, 1, [output_like(q, long_q)])
    bounds = _bounds(_visible(plan, arrays, (short_q, long_k)).swapaxes(1, 2), batch)
    inputs, outputs = inputs._replace(bounds=bounds), [output_like(x, long_k) for x in (k, v)]
    dk, dv = call_kernel(plan, key_value_gradient, inputs, plan.group, outputs)
    return dq, dk, dv, None, None


_attend.defvjp(_forward, _backward)


def _pad(x: Array, axis: int, size: int) -> Array:
    """`x` with zeros at the end of `axis` until it has `size`."""
    widths = [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths)


def _power_of_two(size: int) -> int:
    """The least power of two that is at least `size`, and at least 16."""
    return max(_SMALLEST, 1 << (size - 1).bit_length())
