"""cuDNN's flash attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxformer.ops.attention.spec import (
    AMPERE,
    AttentionSpec,
    Call,
    DeviceFunction,
    DeviceInfo,
    value_size_reasons,
)
from jaxformer.ops.masks import AnyArray, AttentionMask

_HOPPER = (9, 0)


class CudnnArguments(NamedTuple):
    """The arguments of `jax.nn.dot_product_attention` in place of a mask."""

    k: Array  # [B, S, K, H]
    v: Array  # [B, S, K, H]
    is_causal: bool
    lengths: Array | None  # [B] int32: the number of keys of each example
    window: tuple[int, int] | None  # the number of keys before and after the query's own


def cudnn_arguments(
    k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], mask: AttentionMask
) -> CudnnArguments:
    """The arguments that mean what `mask` means, for a call that is supported.

    A padding mask becomes a number of keys: without `causal` the order of the keys has no meaning,
    so the real tokens of each example move to the front.
    """
    window = None if mask.window is None else (mask.window - 1, 0)
    if mask.padding_mask is None:
        return CudnnArguments(k, v, mask.causal, None, window)
    real = jnp.asarray(mask.padding_mask)
    order = jnp.argsort(~real, axis=1, stable=True)[:, :, None, None]
    k, v = (jnp.take_along_axis(x, order, axis=1) for x in (k, v))
    # At least one key, so that every softmax is finite; `zeros_for_empty` removes the result.
    lengths = jnp.maximum(real.sum(1, dtype=jnp.int32), 1)
    return CudnnArguments(k, v, mask.causal, lengths, window)


def zeros_for_empty(
    out: Float[Array, "B T N H"], padding_mask: Bool[AnyArray, "B S"]
) -> Float[Array, "B T N H"]:
    """`out` with zeros for the examples that have padding only."""
    return jnp.where(jnp.asarray(padding_mask).any(1)[:, None, None, None], out, 0)


def _compute(call: Call) -> Array:
    arguments = cudnn_arguments(call.k, call.v, call.mask)
    out = jax.nn.dot_product_attention(
        call.q,
        arguments.k,
        arguments.v,
        None if call.bias is None else call.bias.astype(call.q.dtype),
        scale=call.scale,
        is_causal=arguments.is_causal,
        key_value_seq_lengths=arguments.lengths,
        local_window_size=arguments.window,
        implementation="cudnn",
    )
    valid = call.mask.padding_mask
    return out if valid is None else zeros_for_empty(out, valid)


def _limits(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    reasons = value_size_reasons(spec)
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


cudnn: DeviceFunction = DeviceFunction(
    "cudnn",
    DeviceInfo("gpu", "", AMPERE),
    _compute,
    dtypes=("bfloat16", "float16"),
    lacks=("dropout", "softcap", "explicit", "segments"),
    limits=_limits,
)
"""Attention by `jax.nn.dot_product_attention(implementation="cudnn")`.

cuDNN gets the attributes of the mask. It never gets a matrix, which it would add as a bias [T, S].
A bias is rounded to the dtype of the queries. Segments are not supported because JAX's function has
no argument for them.
"""
