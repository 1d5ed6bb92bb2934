"""cuDNN's flash attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxformer.ops.attention.reference import reference
from jaxformer.ops.attention.spec import (
    AttentionSpec,
    DeviceInfo,
    ampere_reasons,
    dropout_reasons,
    explicit_mask_reasons,
    raise_unsupported,
    softcap_reasons,
    value_size_reasons,
)
from jaxformer.ops.dropout import Dropout
from jaxformer.ops.masks import AnyArray, AttentionMask

_HOPPER = (9, 0)


def cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: AttentionMask,
    *,
    scale: float,
    bias: Float[Array, "#B N T S"] | None = None,
    dropout: Dropout | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T N H"]:
    """Attention by `jax.nn.dot_product_attention(implementation="cudnn")`.

    cuDNN gets the attributes of the mask. It never gets a matrix, which it would add as a bias
    [T, S]. A `bias` is rounded to the dtype of `q`. `reference` computes calls with a cache.

    Raises `ConfigError` for what cuDNN or JAX's function does not support;
    `cudnn_unsupported_reasons` lists it. Segments are not supported because JAX's function has no
    argument for them.

    >>> from jaxformer.ops.attention import AttentionSpec, DeviceInfo, select
    >>> h100 = DeviceInfo("gpu", "NVIDIA H100", (9, 0))
    >>> sizes = {"heads": 12, "kv_heads": 12, "key_size": 64, "value_size": 64, "causal": True}
    >>> call = AttentionSpec(batch=8, queries=1024, keys=1024, dtype="bfloat16", **sizes)
    >>> select(call, h100).name
    'cudnn'
    """
    spec = AttentionSpec.create(q, k, v, mask, bias, dropout, softcap)
    if spec.cached:
        return reference(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, softcap=softcap)
    raise_unsupported("cudnn", cudnn_unsupported_reasons(spec, DeviceInfo.current()))
    arguments = cudnn_arguments(k, v, mask)
    out = jax.nn.dot_product_attention(
        q,
        arguments.k,
        arguments.v,
        None if bias is None else bias.astype(q.dtype),
        scale=scale,
        is_causal=arguments.is_causal,
        key_value_seq_lengths=arguments.lengths,
        local_window_size=arguments.window,
        implementation="cudnn",
    )
    return out if mask.padding_mask is None else zeros_for_empty(out, mask.padding_mask)


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


def cudnn_unsupported_reasons(spec: AttentionSpec, device: DeviceInfo) -> list[str]:
    """Why `cudnn` cannot compute `spec` on `device`; empty where it can."""
    reasons = ampere_reasons(device)
    if reasons or device.capability is None:
        return reasons
    reasons = dropout_reasons(spec) + softcap_reasons(spec) + value_size_reasons(spec)
    if spec.dtype not in ("bfloat16", "float16"):
        reasons.append(
            f"supports bfloat16 and float16, but {spec.dtype} was given (set dtype='bfloat16')"
        )
    most = 256 if device.capability >= _HOPPER else 128
    if spec.key_size > most or spec.key_size % 8:
        reasons.append(
            f"needs a head_dim that is a multiple of 8 and at most {most} on this device, but "
            f"head_dim={spec.key_size} was given"
        )
    return reasons + _mask_reasons(spec) + _bias_reasons(spec)


def _mask_reasons(spec: AttentionSpec) -> list[str]:
    """Why `cudnn` does not support the mask of `spec`."""
    reasons = explicit_mask_reasons(spec)
    if spec.segments:
        reasons.append("does not support segments: packed texts would see each other")
    if spec.causal and (spec.offset != 0 or spec.queries != spec.keys):
        offset = "an offset known only at run time"
        offset = offset if spec.offset is None else f"offset={spec.offset}"
        reasons.append(
            "supports causal masks only for T = S and offset=0, but "
            f"T={spec.queries}, S={spec.keys} and {offset} were given"
        )
    if spec.causal and spec.padding_mask:
        reasons.append(
            "does not support padding_mask with causal=True (leave out padding_mask where all "
            "padding is at the end, which no earlier query sees)"
        )
    return reasons


def _bias_reasons(spec: AttentionSpec) -> list[str]:
    """Why `cudnn` does not support the bias of `spec`."""
    reasons = []
    if spec.bias and (spec.queries % 2 or spec.keys % 2):
        reasons.append(
            f"supports a bias only for even lengths, but T={spec.queries} and S={spec.keys} were "
            "given (pad them)"
        )
    if spec.bias and spec.padding_mask:
        reasons.append(
            "does not support a bias with padding_mask, because the keys move to the front and the "
            "bias does not"
        )
    return reasons
