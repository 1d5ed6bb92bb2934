"""A cache of keys and values for several beams, in which nothing is moved.

A step of beam search makes each beam continue one of the last step's beams. Instead of moving keys
and values, the cache keeps a table `beam_ancestors` [B, W, L]: token l of beam w was written by
beam `beam_ancestors[b, w, l]`. The plain twin is to gather keys and values by beam at each step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxformer.ops.masks import AttentionMask


class KeyValue(NamedTuple):
    """Keys [B, S, K, H] and values [B, S, K, Hv] of S tokens."""

    key: jax.Array
    value: jax.Array


class LayerCache(struct.PyTreeNode):
    """The keys and values of one layer, in the layout that attention multiplies.

    Keys [B, K, H, S] and values [B, K, S, Hv] of S = L x `slots`: position l of a sentence has a
    slot for each of its beams. `groups` are the sizes of B and K. Of these, axes of size 1 are left
    out of the arrays: XLA drops them from a product, and a loop would copy an array that has them
    at each step.
    """

    key: jax.Array
    value: jax.Array
    groups: tuple[int, int] = struct.field(pytree_node=False)
    slots: int = struct.field(pytree_node=False, default=1)

    @property
    def max_length(self) -> int:
        """L, the number of tokens of each beam that fit."""
        return self.key.shape[-1] // self.slots


def store(kv: KeyValue, slots: int = 1) -> LayerCache:
    """`kv` in the layout of a cache."""
    key, value = kv.key.transpose(0, 2, 3, 1), kv.value.swapaxes(1, 2)
    ones = tuple(axis for axis in (0, 1) if key.shape[axis] == 1)
    groups = key.shape[0], key.shape[1]
    return LayerCache(key.squeeze(ones), value.squeeze(ones), groups, slots)


def read(layer: LayerCache) -> KeyValue:
    """All keys and values in `layer`, to attend to."""
    leaves = layer.key, layer.value
    key, value = (leaf.reshape(*layer.groups, *leaf.shape[-2:]) for leaf in leaves)
    return KeyValue(key.transpose(0, 3, 1, 2), value.swapaxes(1, 2))


def write(layer: LayerCache, new: KeyValue, position: Int[Array, ""] | int) -> LayerCache:
    """`layer` with the keys [B*W, T, K, H] and values of `new` at position .. position + T."""
    slots = layer.slots

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
    max_length = layers[0].max_length
    if beam_ancestors is None:
        if beams == 1:
            return layers, None
        beam_ancestors = jnp.zeros((batch, 1, max_length), jnp.int32)
    inherited = jnp.take_along_axis(beam_ancestors, parents[:, :, None], axis=1)
    written = jnp.arange(max_length)[None, None] < length
    beam_ancestors = jnp.where(written, inherited, own_slots(beams))
    if beams > layers[0].slots:
        layers = tuple(_with_slots(layer, max_length, beams) for layer in layers)
    return layers, beam_ancestors


def own_slots(beams: int) -> Int[Array, "1 W 1"]:
    """The slot that each of `beams` beams writes to: its own number."""
    return jnp.arange(beams, dtype=jnp.int32)[None, :, None]


@dataclass(frozen=True)
class FoldBeams:
    """`attention_fn` of the queries of R = B*W rows on the keys and values of B sentences.

    The W rows of a sentence (its beams) become Q = W*T further queries of that sentence, so that
    its keys and values are not repeated. Mask and bias are those of the Q queries. Where R is B,
    nothing changes.
    """

    attention_fn: Callable[..., Float[Array, "B Q N Hv"]]

    def __call__(
        self,
        q: Float[Array, "R T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        mask: AttentionMask,
        /,
        **options: Any,
    ) -> Float[Array, "R T N Hv"]:
        """The result for each row; `options` are passed on."""
        folded = q.reshape(k.shape[0], -1, *q.shape[2:])
        return self.attention_fn(folded, k, v, mask, **options).reshape(*q.shape[:3], -1)


def mask_of_beams(
    mask: AttentionMask, beam_ancestors: Int[Array, "B W L"] | None, slots: int, queries: int
) -> AttentionMask:
    """`mask` [B*W, T, L] of T = `queries` as the mask [B, W*T, L*slots] of folded queries."""
    if beam_ancestors is None:
        return mask
    batch, beams, length = beam_ancestors.shape
    allowed = beam_ancestors[..., None] == jnp.arange(slots)[None, None, None]
    allowed = allowed[:, :, None]  # [B, W, 1, L, slots]
    dense = mask.materialize(queries, length)
    if dense is not None:
        dense = jnp.broadcast_to(dense, (batch * beams, 1, queries, length))
        allowed = allowed & dense.reshape(batch, beams, queries, length, 1)
    explicit = allowed.reshape(batch, beams * queries, -1)
    return AttentionMask(offset=mask.offset, explicit=explicit)


def bias_of_beams(
    bias: Float[Array, "1 N T L"] | None, beams: int, slots: int
) -> Float[Array, "1 N Q S"] | None:
    """`bias` for the Q = W*T queries of W = `beams` on the S = L*slots keys."""
    if bias is None or beams == slots == 1:
        return bias
    return jnp.tile(jnp.repeat(bias, slots, axis=-1), (beams, 1))


def _with_slots(layer: LayerCache, length: int, slots: int) -> LayerCache:
    """`layer`, of `length` positions, with `slots` slots at each."""

    def pad(leaf: jax.Array, axis: int) -> jax.Array:
        shape = leaf.shape
        positions = leaf.reshape(*shape[:axis], length, -1, *shape[axis + 1 :])
        return _pad(positions, axis + 1, slots).reshape(*shape[:axis], -1, *shape[axis + 1 :])

    last = layer.key.ndim - 1
    return layer.replace(key=pad(layer.key, last), value=pad(layer.value, last - 1), slots=slots)


def _pad(leaf: jax.Array, axis: int, size: int) -> jax.Array:
    """`leaf` with zeros at the end of `axis` until it has at least `size`."""
    widths = [(0, 0)] * leaf.ndim
    widths[axis] = (0, max(size - leaf.shape[axis], 0))
    return jnp.pad(leaf, widths)
