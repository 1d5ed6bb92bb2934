"""A cache of keys and values for several beams, in which nothing is moved.

A step of beam search makes each beam continue one of the last step's beams. Instead of moving keys
and values, the cache keeps a table `beam_ancestors` [B, W, L]: token l of beam w was written by
beam `beam_ancestors[b, w, l]`. The plain twin is to gather keys and values by beam at each step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxformer.ops.masks import AttentionMask


class KeyValue(struct.PyTreeNode):
    """Keys [B, S, K, H] and values [B, S, K, Hv] of S tokens.

    With `beam_ancestors` [B, W, L] they belong to W beams: S is L x slots, and token l of beam w
    is the one at position l, slot `beam_ancestors[b, w, l]`.
    """

    key: jax.Array
    value: jax.Array
    beam_ancestors: jax.Array | None = None


class LayerCache(struct.PyTreeNode):
    """The keys and values of one layer, in the layout that attention multiplies.

    Keys [B, K, H, S] and values [B, K, S, Hv]. `groups` are the sizes of B and K. Of these, axes of
    size 1 are left out of the arrays: XLA drops them from a product, and a loop would copy an array
    that has them at each step.
    """

    key: jax.Array
    value: jax.Array
    groups: tuple[int, int] = struct.field(pytree_node=False)
    beam_ancestors: jax.Array | None = None

    @property
    def max_length(self) -> int:
        """L, the number of tokens of each beam that fit."""
        if self.beam_ancestors is None:
            return self.key.shape[-1]
        return self.beam_ancestors.shape[2]


def store(kv: KeyValue) -> LayerCache:
    """`kv` in the layout of a cache."""
    key, value = kv.key.transpose(0, 2, 3, 1), kv.value.swapaxes(1, 2)
    ones = tuple(axis for axis in (0, 1) if key.shape[axis] == 1)
    groups = key.shape[0], key.shape[1]
    return LayerCache(key.squeeze(ones), value.squeeze(ones), groups, kv.beam_ancestors)


def read(layer: LayerCache) -> KeyValue:
    """All keys and values in `layer`, to attend to."""
    leaves = layer.key, layer.value
    key, value = (leaf.reshape(*layer.groups, *leaf.shape[-2:]) for leaf in leaves)
    return KeyValue(key.transpose(0, 3, 1, 2), value.swapaxes(1, 2), layer.beam_ancestors)


def write(layer: LayerCache, new: KeyValue, position: Int[Array, ""] | int) -> LayerCache:
    """`layer` with the keys [B*W, T, K, H] and values of `new` at position .. position + T."""
    slots = layer.key.shape[-1] // layer.max_length

    def to_slots(leaf: jax.Array) -> jax.Array:
        """[B*W, T, K, H] as [B, T * slots, K, H]."""
        leaf = leaf.reshape(layer.groups[0], -1, *leaf.shape[1:]).swapaxes(1, 2)
        leaf = _pad(leaf, 2, slots)
        return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])

    stored, start = store(KeyValue(to_slots(new.key), to_slots(new.value))), position * slots
    key = jax.lax.dynamic_update_slice_in_dim(layer.key, stored.key, start, axis=-1)
    value = jax.lax.dynamic_update_slice_in_dim(layer.value, stored.value, start, axis=-2)
    return layer.replace(key=key, value=value)


def reorder(
    layers: tuple[LayerCache, ...],
    beam_ancestors: Int[Array, "B W L"] | None,
    parents: Int[Array, "B W2"],
    length: Int[Array, ""],
) -> tuple[tuple[LayerCache, ...], Int[Array, "B W2 L"] | None]:
    """`layers` and `beam_ancestors` in which beam w continues beam `parents[b, w]`.

    `length` tokens of each beam are written. Where there are more beams than slots, slots are
    added; otherwise `layers` are the same arrays.
    """
    batch, beams = parents.shape
    max_length = layers[0].max_length if beam_ancestors is None else beam_ancestors.shape[2]
    if beam_ancestors is None:
        if beams == 1:
            return layers, None
        beam_ancestors = jnp.zeros((batch, 1, max_length), jnp.int32)
    inherited = jnp.take_along_axis(beam_ancestors, parents[:, :, None], axis=1)
    written = jnp.arange(max_length)[None, None] < length
    beam_ancestors = jnp.where(written, inherited, own_slots(beams))
    if beams * max_length > layers[0].key.shape[-1]:
        layers = tuple(_with_slots(layer, max_length, beams) for layer in layers)
    return layers, beam_ancestors


def own_slots(beams: int) -> Int[Array, "1 W 1"]:
    """The slot that each of `beams` beams writes to: its own number."""
    return jnp.arange(beams, dtype=jnp.int32)[None, :, None]


def attend(
    attention_fn: Callable[..., Float[Array, "B Q N Hv"]],
    q: Float[Array, "R T N H"],
    kv: KeyValue,
    mask: AttentionMask,
    *,
    bias: Float[Array, "1 N T L"] | None,
    **options: Any,
) -> Float[Array, "R T N Hv"]:
    """`attention_fn` of the queries of R = B*W rows on the keys and values of B sentences.

    The W rows of a sentence (its beams) become Q = W*T further queries of that sentence, so that
    its keys and values are not repeated. With `beam_ancestors`, mask and bias are given per row
    and per position. `options` are passed on.
    """
    folded = q.reshape(kv.key.shape[0], -1, *q.shape[2:])
    mask, bias = expand_for_beams(kv, mask, bias, q.shape[1])
    out = attention_fn(folded, kv.key, kv.value, mask, bias=bias, **options)
    return out.reshape(*q.shape[:3], -1)


def expand_for_beams(
    kv: KeyValue, mask: AttentionMask, bias: Float[Array, "1 N T L"] | None, queries: int
) -> tuple[AttentionMask, Float[Array, "1 N Q S"] | None]:
    """`mask` [B*W, T, L] and `bias` of T = `queries` for W*T queries and all S slots of `kv`."""
    if kv.beam_ancestors is None:
        return mask, bias
    batch, beams, length = kv.beam_ancestors.shape
    slots = kv.key.shape[1] // length
    allowed = kv.beam_ancestors[..., None] == jnp.arange(slots)[None, None, None]
    allowed = allowed[:, :, None]  # [B, W, 1, L, slots]
    dense = mask.materialize(queries, length)
    if dense is not None:
        dense = jnp.broadcast_to(dense, (batch * beams, 1, queries, length))
        allowed = allowed & dense.reshape(batch, beams, queries, length, 1)
    allowed = allowed.reshape(batch, beams * queries, -1)
    if bias is not None:
        bias = jnp.tile(jnp.repeat(bias, slots, axis=-1), (beams, 1))
    return AttentionMask(explicit=allowed, offset=mask.offset), bias  # traced: that of a cache


def _with_slots(layer: LayerCache, length: int, slots: int) -> LayerCache:
    """`layer`, of `length` positions, with `slots` slots at each."""

    def pad(leaf: jax.Array, axis: int) -> jax.Array:
        shape = leaf.shape
        positions = leaf.reshape(*shape[:axis], length, -1, *shape[axis + 1 :])
        return _pad(positions, axis + 1, slots).reshape(*shape[:axis], -1, *shape[axis + 1 :])

    last = layer.key.ndim - 1
    return layer.replace(key=pad(layer.key, last), value=pad(layer.value, last - 1))


def _pad(leaf: jax.Array, axis: int, size: int) -> jax.Array:
    """`leaf` with zeros at the end of `axis` until it has at least `size`."""
    widths = [(0, 0)] * leaf.ndim
    widths[axis] = (0, max(size - leaf.shape[axis], 0))
    return jnp.pad(leaf, widths)
