"""Flash attention on TPUs that reads and writes heads side by side, without another layout."""

from functools import partial
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxformer.ops.attention.reference import reference
from jaxformer.ops.attention.spec import (
    FLASH_RESIDUALS,
    AttentionSpec,
    DeviceInfo,
    heads_per_device,
    on_mesh,
    raise_unsupported,
    softcap_reasons,
    value_size_reasons,
)
from jaxformer.ops.attention.tpu_flash_kernels import LANES, Plan, backward, forward
from jaxformer.ops.attention.tpu_splash import (
    block_size,
    segment_ids,
    tpu_splash_unsupported_reasons,
)
from jaxformer.ops.dropout import Dropout
from jaxformer.ops.masks import AttentionMask

_MOST_QUERIES = 4096  # the gradient of a head's queries stays on the chip, in float32


def tpu_flash(
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
    """Attention by a Pallas kernel for TPUs; the plain twin is `reference`.

    Splash attention takes arrays [B, N, T, H], so XLA copies queries, keys, values and their
    gradients into that layout, where a head of 64 fills half of a TPU's 128 lanes. This function
    takes the layout [B, T, N * H] of the projections, in which no lane is empty. One kernel
    computes the three gradients. Causal masks skip the blocks in which no query sees a key; padding
    is a segment, as in `tpu_splash`. `reference` computes calls with a cache or with fewer than 128
    queries. `interpret` runs the kernels on any device, slowly, for tests.

    Raises `ConfigError` for what it does not support; `tpu_flash_unsupported_reasons` lists it.

    >>> from jaxformer.ops.attention import AttentionSpec, DeviceInfo, select
    >>> v5e = DeviceInfo("tpu", "TPU v5 lite")
    >>> sizes = {"heads": 12, "kv_heads": 12, "key_size": 64, "value_size": 64, "causal": True}
    >>> call = AttentionSpec(batch=8, queries=1024, keys=1024, dtype="bfloat16", **sizes)
    >>> select(call, v5e).name
    'tpu_flash'
    """
    spec = AttentionSpec.create(q, k, v, mask, bias, dropout, softcap)
    if spec.cached or spec.queries < LANES:
        return reference(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, softcap=softcap)
    device = DeviceInfo("tpu") if interpret else DeviceInfo.current()
    raise_unsupported("tpu_flash", tpu_flash_unsupported_reasons(spec, device))
    plan = Plan(
        queries=spec.queries,
        keys=spec.keys,
        heads=heads_per_device(spec)[0],
        head_dim=spec.key_size,
        block_q=block_size(spec.queries, device),
        block_k=block_size(spec.keys, device),
        causal=spec.causal,
        offset=spec.offset or 0,
        scale=scale,
        interpret=interpret,
    )
    segments = segment_ids(mask, spec)
    flat = (x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    attend = on_mesh(partial(_attend, plan), spec, (2, 2, 2, None), 2)
    return attend(*flat, None if segments is None else tuple(segments)).reshape(q.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q: Array, k: Array, v: Array, segments: Any) -> Array:
    return forward(plan, q, k, v, segments)[0]


def _attend_forward(plan: Plan, q: Array, k: Array, v: Array, segments: Any) -> Any:
    out, log_sum = checkpoint_name(forward(plan, q, k, v, segments), FLASH_RESIDUALS)
    return out, (q, k, v, segments, out, log_sum)


def _attend_backward(plan: Plan, saved: Any, d_out: Array) -> Any:
    q, k, v, segments, out, log_sum = saved
    return *backward(plan, q, k, v, segments, out, log_sum, d_out), None


_attend.defvjp(_attend_forward, _attend_backward)


def tpu_flash_unsupported_reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    """Why `tpu_flash` cannot compute `spec` on `device`; empty where it can."""
    reasons = tpu_splash_unsupported_reasons(spec, device)
    if device.platform != "tpu":
        return reasons
    reasons += softcap_reasons(spec) + value_size_reasons(spec)
    if spec.window is not None:
        reasons.append("does not support a window")
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
