"""tokamax's flash attention for NVIDIA's Hopper and later, for what `cudnn` does not support.

`--training.attention_fn jaxformer.ops.attention.tokamax_gpu:tokamax_gpu`, after `pip install
tokamax` (Python 3.12, JAX 0.11.1 or later). `auto` does not select it.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxformer.errors import MissingExtra
from jaxformer.ops.attention.spec import (
    AMPERE,
    AttentionSpec,
    Call,
    DeviceFunction,
    DeviceInfo,
    on_mesh,
)


def attend(call: Call, implementation: str = "mosaic") -> Array:
    """Attention by tokamax; "xla" has the same arguments and runs on all devices."""
    try:
        import tokamax
    except ImportError as error:
        raise MissingExtra("tokamax_gpu needs tokamax: pip install tokamax") from error
    spec, mask = call.spec, call.mask
    shape = spec.queries, spec.keys
    is_causal = mask.causal and mask.window is None and spec.offset == 0
    rest = replace(mask, causal=False) if is_causal else mask
    attention = partial(
        tokamax.dot_product_attention,
        scale=call.scale,
        is_causal=is_causal,
        logits_soft_cap=spec.softcap,
        implementation=implementation,
    )

    def part(q: Array, k: Array, v: Array, allowed: Any, bias: Any) -> Array:
        return attention(q, k, v, bias, allowed)

    part = on_mesh(part, spec, (2, 2, 2, None, 1), 2)
    out = part(call.q, call.k, call.v, rest.materialize(*shape), call.bias)
    allowed = mask.materialize(*shape)
    return out if allowed is None else jnp.where(allowed.any(-1)[:, 0, :, None, None], out, 0)


def _limits(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    reasons = []
    if (device.capability or ()) < (9, 0):  # tokamax has no backward kernel for older ones
        reasons.append(f"needs an NVIDIA GPU of the Hopper generation or later, not {device}")
    if spec.bias and spec.softcap is not None:  # tokamax caps the sum of logits and bias
        reasons.append("does not support a soft cap with a bias")
    return reasons


tokamax_gpu: DeviceFunction = DeviceFunction(
    "tokamax_gpu",
    DeviceInfo("gpu", "", AMPERE),
    attend,
    dtypes=("bfloat16", "float16"),
    lacks=("dropout",),
    limits=_limits,
    least_queries=16,
)
"""Attention by `tokamax.dot_product_attention(implementation="mosaic")`.

It has heads of any size and soft caps. All masks but a causal one become a matrix [B, 1, T, S] of
bool, since tokamax has no argument for segments. Compiled for an H100, not run.
"""
