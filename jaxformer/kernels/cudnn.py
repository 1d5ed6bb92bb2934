"""cuDNN's flash attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxformer.dropout import Dropout
from jaxformer.kernels.call import (
    Call,
    Machine,
    refuse,
    refuse_dropout,
    refuse_pairs,
    refuse_value_size,
)
from jaxformer.masks import Mask

_OTHERS = "use the blockwise or the reference kernel"
_HOPPER = (9, 0)
_AMPERE = (8, 0)


def cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    scale: float,
    bias: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """Attention [B, T, N, H] by `jax.nn.dot_product_attention(implementation="cudnn")`.

    cuDNN is told facts, never a boolean matrix, which it would add up as a bias of [T, S]:
    `is_causal`, a window to the left, and how many keys each row has. Padding becomes such a
    number exactly, wherever in the row it stands: without a direction the order of the keys is
    of no meaning, so each row's valid keys are moved to its front. A `bias` is rounded to the
    dtype of `q`. Raises `ConfigError` for all that cuDNN or JAX's way to it cannot do;
    `cudnn_refusals` lists it. Segments are refused because the public function has no place for
    them, and passing them over gives wrong results without a word.
    """
    refuse("cudnn", cudnn_refusals(Call.of(q, k, v, mask, bias, dropout), Machine.here()))
    told = tell_cudnn(k, v, mask)
    out = jax.nn.dot_product_attention(
        q,
        told.k,
        told.v,
        None if bias is None else bias.astype(q.dtype),
        scale=scale,
        is_causal=told.is_causal,
        key_value_seq_lengths=told.lengths,
        local_window_size=told.window,
        implementation="cudnn",
    )
    return out if mask.key_valid is None else zeros_without_keys(out, mask.key_valid)


class Told(NamedTuple):
    """What `jax.nn.dot_product_attention` is told in place of a mask."""

    k: jax.Array  # [B, S, K, H]
    v: jax.Array  # [B, S, K, H]
    is_causal: bool
    lengths: jax.Array | None  # [B] int32: the keys of each row
    window: tuple[int, int] | None  # how many keys before and after the query's own


def tell_cudnn(k: jax.Array, v: jax.Array, mask: Mask) -> Told:
    """Keys, values and arguments that mean what `mask` means, for a call that is not refused."""
    window = None if mask.window is None else (mask.window - 1, 0)
    if mask.key_valid is None:
        return Told(k, v, mask.causal, None, window)
    valid = jnp.asarray(mask.key_valid)
    order = jnp.argsort(~valid, axis=1, stable=True)[:, :, None, None]
    k, v = (jnp.take_along_axis(x, order, axis=1) for x in (k, v))
    # A row without keys is given one, so that its softmax is finite, and its result is put out.
    lengths = jnp.maximum(valid.sum(1, dtype=jnp.int32), 1)
    return Told(k, v, mask.causal, lengths, window)


def zeros_without_keys(out: jax.Array, key_valid: jax.Array) -> jax.Array:
    """`out` [B, T, N, H] with zeros in the rows in which no key is valid."""
    return jnp.where(jnp.asarray(key_valid).any(1)[:, None, None, None], out, 0)


def cudnn_refusals(call: Call, machine: Machine) -> list[str]:
    """Why the cudnn kernel cannot compute `call` on `machine`; empty where it can."""
    if machine.platform != "gpu" or machine.capability is None or machine.capability < _AMPERE:
        return [f"needs an NVIDIA GPU of Ampere's generation or later, not {machine}: {_OTHERS}"]
    refusals = refuse_dropout(call) + refuse_value_size(call)
    if call.dtype not in ("bfloat16", "float16"):
        refusals.append(
            f"computes in bfloat16 or float16, but {call.dtype} was given: set dtype='bfloat16', "
            f"or {_OTHERS}"
        )
    most = 256 if machine.capability >= _HOPPER else 128
    if call.key_size > most or call.key_size % 8:
        refusals.append(
            f"needs a head_dim that 8 divides, at most {most} on this device, but head_dim="
            f"{call.key_size} was given: {_OTHERS}"
        )
    return refusals + _refuse_mask(call) + _refuse_bias(call)


def _refuse_mask(call: Call) -> list[str]:
    refusals = refuse_pairs(call)
    if call.segments:
        refusals.append(
            "is not told of segments by JAX's public function, so packed texts would see each "
            f"other: {_OTHERS}"
        )
    if call.window is not None and not call.causal:
        refusals.append(
            f"counts a window backwards from the query, but window={call.window} was given "
            "without causal=True: set it"
        )
    if call.causal and (call.offset != 0 or call.queries != call.keys):
        offset = "one known only at run time" if call.offset is None else call.offset
        refusals.append(
            f"puts query 0 at key 0 of equally many, but T={call.queries}, S={call.keys} and "
            f"offset {offset} were given: {_OTHERS}"
        )
    if call.causal and call.key_valid:
        refusals.append(
            "knows padding as a number of keys, and with causal=True the valid keys cannot be "
            "moved to the front: leave out key_valid where all padding is at the end (no earlier "
            f"query sees it), or {_OTHERS}"
        )
    return refusals


def _refuse_bias(call: Call) -> list[str]:
    refusals = []
    if call.bias and (call.queries % 2 or call.keys % 2):
        refusals.append(
            f"trains with a bias only for even lengths, but T={call.queries} and S={call.keys} "
            f"were given: pad them to even ones, or {_OTHERS}"
        )
    if call.bias and call.key_valid:
        refusals.append(
            "moves the valid keys to the front, where a bias by position would not follow: "
            f"{_OTHERS}"
        )
    return refusals
