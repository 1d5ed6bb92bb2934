"""Splash attention on TPUs: the Pallas kernel that comes with JAX."""

import jax
import jax.numpy as jnp

from jaxformer.dropout import Dropout
from jaxformer.kernels.call import Call, Machine, refuse, refuse_dropout, refuse_pairs
from jaxformer.masks import Mask

_OTHERS = "use the blockwise or the reference kernel"
_LANES = 128  # of a TPU's vector unit: the least block of queries or keys


def pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    scale: float,
    bias: jax.Array | None = None,
    dropout: Dropout | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attention [B, T, N, Hv] by `jax.experimental.pallas.ops.tpu.splash_attention`.

    Causal masks and windows skip the blocks that nothing sees; padding is expressed as a segment
    that no query belongs to (so no segment may be numbered -2^31). `interpret` computes it on any
    machine, slowly, to test it. A mesh must be entered by `jax.shard_map`: a Pallas kernel is not
    partitioned by itself.

    There is no Pallas kernel for GPUs here: of those that come with JAX the one for Triton knows
    no grouped heads and is slower than cuDNN, and the one for Mosaic has no causal backward pass.

    Raises `ConfigError` for what splash attention cannot do; `pallas_refusals` lists it.
    """
    machine = Machine("tpu") if interpret else Machine.here()
    refuse("pallas", pallas_refusals(Call.of(q, k, v, mask, bias, dropout), machine))
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    attend = _splash(mask, q.shape[1:3] + k.shape[2:3], interpret)
    segments = _segments(mask, q.shape[2], k.shape[2])
    # The scale goes into the queries, in float32: splash attention has none of its own.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    out = jnp.swapaxes(jax.vmap(attend)(q, k, v, segments), 1, 2)
    allowed = mask.dense(q.shape[2], k.shape[2])
    if allowed is None:
        return out
    some = jnp.moveaxis(allowed.any(-1), 1, 2)[..., None]  # [B or 1, T, 1, 1]
    return jnp.where(some, out, 0)


def _splash(mask: Mask, sizes: tuple[int, int, int], interpret: bool):
    """Splash attention of one row, for the facts of `mask` known while tracing; N, T, S."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    heads, queries, keys = sizes
    shape = (queries, keys)
    if not mask.causal:
        facts = splash.FullMask(shape)
    elif mask.window is None:
        facts = splash.CausalMask(shape, mask.offset)
    else:
        facts = splash.LocalMask(shape, (mask.window - 1, 0), mask.offset)
    return splash.make_splash_mha_single_device(
        splash.MultiHeadMask([facts] * heads), interpret=interpret
    )


def _segments(mask: Mask, queries: int, keys: int):
    """The segments [B, T] and [B, S] of `mask`, padding being one of its own; None without any."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    query, key = mask.query_segments, mask.key_segments
    if mask.key_valid is None:
        return None if query is None else splash.SegmentIds(*map(jnp.int32, (query, key)))
    batch = mask.key_valid.shape[0]
    query = jnp.zeros((batch, queries), jnp.int32) if query is None else jnp.int32(query)
    key = jnp.zeros((batch, keys), jnp.int32) if key is None else jnp.int32(key)
    return splash.SegmentIds(query, jnp.where(mask.key_valid, key, jnp.iinfo(jnp.int32).min))


def pallas_refusals(call: Call, machine: Machine) -> list[str]:
    """Why the pallas kernel cannot compute `call` on `machine`; empty where it can."""
    if machine.platform != "tpu":
        return [f"is written for TPUs, not for {machine}: {_OTHERS}"]
    refusals = refuse_dropout(call) + refuse_pairs(call)
    if call.bias:
        refusals.append(f"has no bias on the logits: {_OTHERS}")
    if call.window is not None and not call.causal:
        refusals.append(
            f"counts a window backwards from the query, but window={call.window} was given "
            "without causal=True: set it"
        )
    if call.causal and call.offset is None:
        refusals.append(
            f"must know the offset of a causal mask while it is traced: give a number, or {_OTHERS}"
        )
    if call.queries % _LANES or call.keys % _LANES:
        refusals.append(
            f"needs lengths that {_LANES} divides, but T={call.queries} and S={call.keys} were "
            f"given: pad them, or {_OTHERS}"
        )
    if call.dtype not in ("float32", "bfloat16"):
        refusals.append(f"computes in float32 or bfloat16, but {call.dtype} was given: {_OTHERS}")
    return refusals
