"""cuDNN's flash attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxformer.ops.attention.kernel import (
    AMPERE,
    AttentionSpec,
    Call,
    DeviceInfo,
    Kernel,
    unsupported,
)

_HOPPER = (9, 0)


def attend(call: Call, implementation: Literal["cudnn", "xla"] = "cudnn") -> Array:
    """Attention by JAX's function; "xla" has the same arguments and runs on all devices.

    A padding mask becomes a number of keys: without `causal` the order of the keys has no meaning,
    so the real tokens of each example move to the front.
    """
    k, v, mask, lengths = call.k, call.v, call.mask, None
    real = None if mask.padding_mask is None else jnp.asarray(mask.padding_mask)
    if real is not None:
        order = jnp.argsort(~real, axis=1, stable=True)[:, :, None, None]
        k, v = (jnp.take_along_axis(x, order, axis=1) for x in (k, v))
        # At least one key, so that every softmax is finite.
        lengths = jnp.maximum(real.sum(1, dtype=jnp.int32), 1)
    out = jax.nn.dot_product_attention(
        call.q,
        k,
        v,
        None if call.bias is None else call.bias.astype(call.q.dtype),
        scale=call.scale,
        is_causal=mask.causal,
        key_value_seq_lengths=lengths,
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation=implementation,
    )
    return out if real is None else jnp.where(real.any(1)[:, None, None, None], out, 0)


def _reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    lacks = "dropout", "softcap", "explicit", "segments"
    reasons = unsupported(spec, ("bfloat16", "float16"), lacks)
    if spec.value_size != spec.key_size:
        sizes = f"{spec.key_size} and {spec.value_size}"
        reasons.append(f"needs values as large as keys, not {sizes}")
    most = 256 if (device.capability or ()) >= _HOPPER else 128
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


cudnn: Kernel = Kernel("cudnn", attend, _reasons, DeviceInfo("gpu", "", AMPERE))
"""Attention by `jax.nn.dot_product_attention(implementation="cudnn")`.

cuDNN gets the attributes of the mask. It never gets a matrix, which it would add as a bias [T, S].
A bias is rounded to the dtype of the queries. Segments are not supported because JAX's function has
no argument for them.
"""
