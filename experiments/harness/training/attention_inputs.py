"""A small call of attention like another one, and arrays for a call."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.ops.attention import AttentionSpec
from jaxformer.ops.dropout import DropoutMask, DropoutRng
from jaxformer.ops.masks import AttentionMask

_LONGEST = 512
"""The most queries and keys of a small call: two blocks of every kernel."""


def small_call(spec: AttentionSpec) -> AttentionSpec:
    """A call of the kinds of `spec` with 2 examples and few heads, queries and keys."""
    kv_heads = min(spec.kv_heads, 2)
    queries = min(spec.queries, _LONGEST)
    return replace(
        spec,
        batch=2,
        heads=kv_heads * (spec.heads // spec.kv_heads),
        kv_heads=kv_heads,
        queries=queries,
        keys=queries if spec.keys == spec.queries else min(spec.keys, _LONGEST),
        window=None if spec.window is None else min(spec.window, max(queries // 3, 1)),
    )


def inputs_of(call: AttentionSpec) -> list[Any]:
    """Queries, keys and values."""
    rng = np.random.default_rng(0)
    shapes = (
        (call.batch, call.queries, call.heads, call.key_size),
        (call.batch, call.keys, call.kv_heads, call.key_size),
        (call.batch, call.keys, call.kv_heads, call.value_size),
    )
    return [rng.standard_normal(shape).astype(jnp.dtype(call.dtype)) for shape in shapes]


def mask_of(call: AttentionSpec, rng: np.random.Generator) -> AttentionMask:
    """A mask of the kinds of `call`; a third of the keys of every second example is padding."""
    keys = np.arange(call.keys)[None]
    is_second = np.arange(call.batch)[:, None] % 2 == 1
    facts: dict[str, Any] = {"from_cache": call.from_cache}
    if call.padding_mask:
        facts["padding_mask"] = keys < np.where(is_second, max(2 * call.keys // 3, 1), call.keys)
    if call.segments:
        second = np.where(is_second, call.keys // 2, call.keys // 3)
        segments = 1 + (keys >= second).astype(np.int32)
        facts |= {"query_segments": segments[:, -call.queries :], "key_segments": segments}
    if call.explicit:
        facts["explicit"] = rng.random((call.batch, call.queries, call.keys)) < 0.9
    offset = call.keys - call.queries if call.offset is None else call.offset
    return AttentionMask(causal=call.causal, window=call.window, offset=offset, **facts)


def options_of(call: AttentionSpec, rng: np.random.Generator) -> dict[str, Any]:
    """The other arguments of a call of these kinds."""
    options: dict[str, Any] = {"scale": call.key_size**-0.5}
    if call.bias:
        shape = 1, call.heads, call.queries, call.keys
        options["bias"] = rng.standard_normal(shape).astype(np.float32)
    if call.dropout:
        random = DropoutRng(jax.random.key(0), jnp.arange(call.batch))
        options["dropout"] = DropoutMask(random, "device_check", call.dropout)
    if call.softcap is not None:
        options["softcap"] = call.softcap
    return options
