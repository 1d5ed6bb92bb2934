"""Splash attention on TPUs, the Pallas implementation that comes with JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxformer.ops.attention.reference import reference
from jaxformer.ops.attention.spec import (
    FLASH_RESIDUALS,
    AttentionSpec,
    DeviceInfo,
    dropout_reasons,
    explicit_mask_reasons,
    on_mesh,
    raise_unsupported,
)
from jaxformer.ops.dropout import Dropout
from jaxformer.ops.masks import AttentionMask

_LANES = 128  # of a TPU's vector unit: the smallest block of queries or keys


def tpu_splash(
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
    """Attention by `jax.experimental.pallas.ops.tpu.splash_attention`.

    Causal masks and windows skip the blocks in which no query sees a key. Padding becomes a segment
    to which no query belongs, so no segment may have the number -2^31. On a mesh whose axis
    "tensor" divides the heads, each device computes its own heads, through `jax.shard_map`.
    `reference` computes calls with a cache or with fewer than 128 queries (a block). `interpret`
    runs the kernel on any device, slowly, for tests.

    Raises `ConfigError` for what it does not support; `tpu_splash_unsupported_reasons` lists it.

    >>> from jaxformer.ops.attention import AttentionSpec, DeviceInfo, select
    >>> v5e = DeviceInfo("tpu", "TPU v5 lite")
    >>> sizes = {"heads": 12, "kv_heads": 4, "key_size": 64, "value_size": 64, "causal": True}
    >>> call = AttentionSpec(batch=8, queries=1024, keys=1024, dtype="bfloat16", **sizes)
    >>> select(call, v5e).name
    'tpu_splash'
    """
    spec = AttentionSpec.create(q, k, v, mask, bias, dropout, softcap)
    if spec.cached or spec.queries < _LANES:
        return reference(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, softcap=softcap)
    device = DeviceInfo("tpu") if interpret else DeviceInfo.current()
    raise_unsupported("tpu_splash", tpu_splash_unsupported_reasons(spec, device))
    # The scale goes into the queries, in float32: splash attention has no argument for it.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))

    def attend(q: Array, k: Array, v: Array, segments: Any) -> Array:
        return jax.vmap(_splash_for_one_example(spec, q.shape[1], device, interpret))(
            q, k, v, segments
        )

    attend = on_mesh(attend, spec, (1, 1, 1, None), 1)
    out = jnp.swapaxes(attend(q, k, v, segment_ids(mask, spec)), 1, 2)
    if _each_query_has_a_key(mask, spec):
        return out
    allowed = mask.materialize(spec.queries, spec.keys)
    if allowed is None:
        return out
    has_key = jnp.moveaxis(allowed.any(-1), 1, 2)  # [B, T, 1]
    return jnp.where(has_key[..., None], out, 0)


def _each_query_has_a_key(mask: AttentionMask, spec: AttentionSpec) -> bool:
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


def _splash_for_one_example(
    spec: AttentionSpec, heads: int, device: DeviceInfo, interpret: bool
) -> Any:
    """Splash attention of one example with `heads` of the spec's heads."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape, offset = (spec.queries, spec.keys), spec.offset or 0
    if not spec.causal:
        one_head: Any = splash.FullMask(shape)
    elif spec.window is None:
        one_head = splash.CausalMask(shape, offset)
    else:
        one_head = splash.LocalMask(shape, (spec.window - 1, 0), offset)
    q, kv = (block_size(length, device) for length in shape)
    sizes = splash.BlockSizes(
        block_q=q,
        block_kv=kv,
        block_q_dkv=q,
        block_kv_dkv=kv,
        block_q_dq=q,
        block_kv_dq=kv,
    )
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([one_head] * heads),
        block_sizes=sizes,
        attn_logits_soft_cap=spec.softcap,
        interpret=interpret,
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


def tpu_splash_unsupported_reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    """Why `tpu_splash` cannot compute `spec` on `device`; empty where it can."""
    if device.platform != "tpu":
        return [f"needs a TPU, not {device}"]
    reasons = dropout_reasons(spec) + explicit_mask_reasons(spec)
    if spec.bias:
        reasons.append("does not support a bias on the logits")
    if spec.causal and spec.offset is None:
        reasons.append(
            "needs the offset of a causal mask while it is traced, but it is known only at run "
            "time (give a Python int)"
        )
    if spec.queries % _LANES or spec.keys % _LANES:
        reasons.append(
            f"needs lengths that are multiples of {_LANES}, but T={spec.queries} and "
            f"S={spec.keys} were given (pad them)"
        )
    if spec.dtype not in ("float32", "bfloat16"):
        reasons.append(f"supports float32 and bfloat16, but {spec.dtype} was given")
    return reasons
