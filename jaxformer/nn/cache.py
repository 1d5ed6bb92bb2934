"""The state of decoding: the keys and values of the tokens so far, and of the encoded source.

A step of beam search makes each beam continue one of the last step's beams. Instead of moving keys
and values, the cache keeps a table `beam_ancestors` [B, W, L]: token l of beam w was written by
beam `beam_ancestors[b, w, l]`. The plain twin is to gather keys and values by beam at each step.

A layer of one's own may keep something else, such as a recurrent state: a `LayerState`, or a tree
of `LayerCache` and `LayerState`. These are the parts of a cache, which know how sentences and beams
move. An attention or a block makes the empty part in its method `init_cache(batch_size, num_beams,
max_length, d_model)`, and its method `decode` returns it with new tokens added.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxformer.config import Learned, TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.ops.flat_one_hot import flat_one_hot
from jaxformer.ops.masks import AnyArray, AttentionMask
from jaxformer.ops.padding import pad_to
from jaxformer.ops.row_writes import write_rows
from jaxformer.ops.rows import put_rows_into, take_rows_of


class LayerCache(struct.PyTreeNode):
    """The keys and values of one layer, in the layout that attention multiplies.

    Keys [B, K, H, S] and values [B, K, S, Hv] of S = L x `slots`: position l of a sentence has a
    slot for each of its beams. `groups` are the sizes of B and K. The arrays have no such axis of
    size 1: XLA drops it from a product, and a loop would copy an array that has it at each step.

    >>> keys = values = jnp.zeros((2, 5, 4, 3))  # [B, L, K, H]
    >>> cache = jf.LayerCache.create(keys, values)
    >>> cache = cache.write(jnp.ones((2, 1, 4, 3)), jnp.ones((2, 1, 4, 3)), position=3)
    >>> cache.read()[0][0, :, 0, 0]
    Array([0., 0., 0., 1., 0.], dtype=float32)
    """

    can_truncate: ClassVar[bool] = True
    key: jax.Array
    value: jax.Array
    groups: tuple[int, int] = struct.field(pytree_node=False)
    slots: int = struct.field(pytree_node=False, default=1)

    @classmethod
    def create(
        cls, keys: Float[Array, "B S K H"], values: Float[Array, "B S K Hv"], slots: int = 1
    ) -> "LayerCache":
        """Keys and values in the layout of a cache."""
        key, value = keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)
        ones = tuple(axis for axis in (0, 1) if key.shape[axis] == 1)
        return cls(key.squeeze(ones), value.squeeze(ones), (key.shape[0], key.shape[1]), slots)

    @classmethod
    def empty(
        cls,
        batch_size: int,
        num_beams: int,
        max_length: int,
        *,
        kv_heads: int,
        key_size: int,
        value_size: int,
        dtype: Any,
    ) -> "LayerCache":
        """Zeros for up to `max_length` tokens of each of `num_beams` beams."""
        shape = batch_size, max_length * num_beams, kv_heads
        keys = jnp.zeros((*shape, key_size), dtype)
        values = jnp.zeros((*shape, value_size), dtype)
        return cls.create(keys, values, num_beams)

    @property
    def max_length(self) -> int:
        """L, the number of tokens of each beam that fit."""
        return self.key.shape[-1] // self.slots

    def read(self) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
        """All keys and values, to attend to."""
        key, value = (x.reshape(*self.groups, *x.shape[-2:]) for x in (self.key, self.value))
        return key.transpose(0, 3, 1, 2), value.swapaxes(1, 2)

    def write(
        self,
        keys: Float[Array, "R T K H"],
        values: Float[Array, "R T K Hv"],
        position: Int[Array, " B"] | Int[Array, ""] | int,
    ) -> "LayerCache":
        """The cache with the `keys` and `values` of T tokens of R = B*W beams from `position` on.

        `position` is one for all sentences, or one for each.
        """

        def to_slots(x: jax.Array) -> jax.Array:
            """[B*W, T, K, H] as [B, T * slots, K, H]."""
            x = x.reshape(self.groups[0], -1, *x.shape[1:]).swapaxes(1, 2)
            x = pad_to(x, 2, self.slots)
            return x.reshape(x.shape[0], -1, *x.shape[3:])

        new = LayerCache.create(to_slots(keys), to_slots(values))
        start: Any = position * self.slots
        if jnp.ndim(start) and self.groups[0] > 1:
            key, value = write_rows(self.key, self.value, new.key, new.value, start)
            return self.replace(key=key, value=value)
        if jnp.ndim(start):
            start = start[0]
        update = jax.lax.dynamic_update_slice_in_dim
        key = update(self.key, new.key, start, axis=-1)
        return self.replace(key=key, value=update(self.value, new.value, start, axis=-2))

    def specs(self, sentences: str | None, heads: str | tuple[str, ...] | None) -> "LayerCache":
        """The `PartitionSpec` of each array, with B and K divided along these mesh axes."""
        entries = [
            axis for axis, size in zip((sentences, heads), self.groups, strict=True) if size > 1
        ]
        leading = [None] * (self.key.ndim - 2 - len(entries))
        spec: Any = PartitionSpec(*leading, *entries)
        return self.replace(key=spec, value=spec)

    def take_rows(self, rows: Int[AnyArray, " K"]) -> "LayerCache":
        """The K sentences `rows`; the arrays may have further axes at their beginnings."""
        whole = self._with_sentences()
        take = partial(jnp.take, indices=rows, axis=whole.key.ndim - 4, mode="clip")
        groups = len(rows), self.groups[1]
        return whole.replace(
            key=take(whole.key), value=take(whole.value), groups=groups
        )._squeezed()

    def put_rows(self, rows: Int[AnyArray, " K"], new: "LayerCache") -> "LayerCache":
        """The cache with the K sentences of `new` in `rows`; a row outside of it is left out."""
        whole = self._with_sentences()
        new = new._with_sentences()
        at = (..., rows, slice(None), slice(None), slice(None))
        key = whole.key.at[at].set(new.key)
        value = whole.value.at[at].set(new.value)
        return whole.replace(key=key, value=value)._squeezed()

    def reorder_beams(self, parents: Int[Array, "B W2"]) -> "LayerCache":
        """The cache for the beams that continue `parents`: nothing moves, slots may be added."""
        beams = parents.shape[1]
        return self if beams <= self.slots else self.with_slots(beams)

    def _with_sentences(self) -> "LayerCache":
        """The cache with all axes [..., B, K, _, _], also axes of size 1."""
        num_groups = sum(size > 1 for size in self.groups)
        leading = self.key.shape[: self.key.ndim - 2 - num_groups]
        key = self.key.reshape(*leading, *self.groups, *self.key.shape[-2:])
        value = self.value.reshape(*leading, *self.groups, *self.value.shape[-2:])
        return self.replace(key=key, value=value)

    def _squeezed(self) -> "LayerCache":
        """The inverse of `_with_sentences`."""
        axes = tuple(i for i in (-4, -3) if self.key.shape[i] == 1)
        return self.replace(key=self.key.squeeze(axes), value=self.value.squeeze(axes))

    def with_slots(self, slots: int) -> "LayerCache":
        """The cache with `slots` slots at each position, no fewer than before."""
        length, last = self.max_length, self.key.ndim - 1

        def pad(x: jax.Array, axis: int) -> jax.Array:
            shape = x.shape
            positions = x.reshape(*shape[:axis], length, -1, *shape[axis + 1 :])
            padded = pad_to(positions, axis + 1, slots)
            return padded.reshape(*shape[:axis], -1, *shape[axis + 1 :])

        return self.replace(key=pad(self.key, last), value=pad(self.value, last - 1), slots=slots)


class LayerState(struct.PyTreeNode):
    """The base of what a layer of one's own keeps of the tokens so far, such as a recurrent state.

    A subclass names its arrays, all of them [B, W, ...]: W beams of B sentences. The module that
    makes it in `init_cache` gets it in `decode`, and returns it with the new tokens added; there
    x [R, T, D] has R = B*W rows, so a row is `array.reshape(-1, *array.shape[2:])`.

    `can_truncate` is False: what was added cannot be taken back, so each prompt is read without
    padding. A subclass whose arrays keep all tokens by position may say True, and has to write
    tokens at `mask.offset` then.

    >>> class Sums(jf.LayerState):
    ...     total: jax.Array
    >>> sums = Sums(jnp.array([[3.0, 5.0], [7.0, 8.0]]))  # two beams of two sentences
    >>> sums.reorder_beams(jnp.array([[1, 1], [0, 1]])).total
    Array([[5., 5.],
           [7., 8.]], dtype=float32)
    >>> sums.take_rows(jnp.array([1])).total
    Array([[7., 8.]], dtype=float32)
    """

    can_truncate: ClassVar[bool] = False
    """Whether the last tokens can be taken back: `Cache.truncate` only says the lengths."""

    def reorder_beams(self, parents: Int[Array, "B W2"]) -> Self:
        """The state in which beam w continues beam `parents[b, w]`; their number may change."""

        def move(x: jax.Array) -> jax.Array:
            index = jnp.expand_dims(parents, range(2, x.ndim))
            return jnp.take_along_axis(x, index, axis=1)

        return jax.tree.map(move, self)

    def take_rows(self, rows: Int[AnyArray, " K"]) -> Self:
        """The K sentences `rows`."""
        return jax.tree.map(lambda x: take_rows_of(x, rows), self)

    def put_rows(self, rows: Int[AnyArray, " K"], new: Self) -> Self:
        """The state with the K sentences of `new` in `rows`; a row outside of it is left out."""
        return jax.tree.map(lambda x, y: put_rows_into(x, rows, y), self, new)


class Cache(struct.PyTreeNode):
    """The state of decoding B sentences with W beams each; a decoding step returns a new one.

    `layers`: what each decoder layer keeps: a `LayerCache` of keys and values with room for L
    tokens of each beam, a `LayerState`, or a tree of them. With `config.scan_layers` it has one
    element, whose arrays have a leading layer axis (`is_stacked`); so has `encoder_kv`.
    `length`: the number of tokens in the cache, of each sentence [B] or of all; a Python int, as in
    an empty cache, stays known while tracing, so that a flash attention function reads a prompt.
    `max_length`: L, the number of tokens of each beam that fit.
    `slots`: the number of beams that keys and values have room for at each position.
    `encoder_kv`: each layer's keys and values of the encoded source, held once per sentence (empty
    without an encoder). `padding_mask` [B, S]: True at the source's real tokens.
    `beam_ancestors` [B, W, L]: which beam wrote token l of beam w; None: there is one beam.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> cache = jf.DecoderOnly(config).init_cache(batch_size=2, num_beams=3, max_length=5)
    >>> cache.max_length, cache.num_beams, int(cache.length)
    (5, 3, 0)
    >>> cache.reorder_beams(jnp.array([[0, 1], [2, 2]])).num_beams  # two beams continue
    2
    """

    layers: tuple[Any, ...]
    length: jax.Array | int
    max_length: int = struct.field(pytree_node=False)
    slots: int = struct.field(pytree_node=False, default=1)
    is_stacked: bool = struct.field(pytree_node=False, default=False)
    encoder_kv: tuple[LayerCache, ...] = ()
    padding_mask: AnyArray | None = None
    beam_ancestors: jax.Array | None = None

    @property
    def can_truncate(self) -> bool:
        """Whether the last tokens of a text can be taken back by `truncate`.

        False where a part of a layer says so, as a `LayerState` does: `truncate` may then only say
        the lengths that the texts have, and `complete` reads each prompt without padding.
        """
        return all(part.can_truncate for part in self.parts())

    @property
    def num_beams(self) -> int:
        """W."""
        return 1 if self.beam_ancestors is None else self.beam_ancestors.shape[1]

    def mask(self) -> AttentionMask:
        """The causal mask [B, T, L] of the next T tokens."""
        return AttentionMask(causal=True, offset=self.length, from_cache=True)

    def mask_of_beams(self, mask: AttentionMask, count: int) -> AttentionMask:
        """`mask` [B, T, L] of T = `count` tokens as that [B, W*T, L*slots] of folded queries."""
        if self.beam_ancestors is None:
            return mask
        batch, beams, length = self.beam_ancestors.shape
        writers = self.beam_ancestors[:, :, None]
        dense = mask.materialize(count, length)
        if dense is not None:
            writers = jnp.where(dense, writers, -1)
        allowed = flat_one_hot(writers, self.slots)  # the slot of each token that a beam may see
        explicit = allowed.reshape(batch, beams * count, -1)
        return AttentionMask(offset=mask.offset, explicit=explicit, from_cache=True)

    def bias_of_beams(self, bias: Float[Array, "_ N T L"] | None) -> Float[Array, "_ N Q S"] | None:
        """`bias` for the Q = W*T folded queries on the S = L*slots keys."""
        beams, slots = self.num_beams, self.slots
        if bias is None or beams == slots == 1:
            return bias
        return jnp.tile(jnp.repeat(bias, slots, axis=-1), (beams, 1))

    def positions(self, count: int) -> Int[Array, " T"] | Int[Array, "R T"]:
        """The positions of the next T = `count` tokens in their sentences; R = B*W."""
        if not jnp.ndim(self.length):
            return self.length + jnp.arange(count)
        positions = jnp.asarray(self.length)[:, None] + jnp.arange(count)[None]
        # What follows an ended sentence has no position: it stays inside the table.
        return jnp.minimum(positions, self.max_length - 1).repeat(self.num_beams, axis=0)

    def advance(self, layers: tuple[Any, ...], count: int) -> "Cache":
        """The cache with the blocks' `layers`, after `count` more tokens."""
        return self.replace(layers=layers, length=self.length + count)

    def reorder_beams(self, parents: Int[Array, "B W2"]) -> "Cache":
        """The cache in which beam w continues beam `parents[b, w]`.

        The number of beams may change. Keys and values do not move; where there are more beams than
        slots, slots are added. Each `LayerState` moves its arrays.
        """
        batch, beams = parents.shape
        ancestors = self.beam_ancestors
        if ancestors is None:
            if beams == 1:
                return self
            ancestors = jnp.zeros((batch, 1, self.max_length), jnp.int32)
        inherited = jnp.take_along_axis(ancestors, parents[:, :, None], axis=1)
        lengths = jnp.asarray(self.length).reshape(-1, 1, 1)
        written = jnp.arange(self.max_length)[None, None] < lengths
        ancestors = jnp.where(written, inherited, _beam_numbers(beams))
        return self.replace(
            layers=self._change_parts(lambda part: part.reorder_beams(parents)),
            beam_ancestors=ancestors,
            slots=max(self.slots, beams),
        )

    def take_rows(self, rows: Int[AnyArray, " K"]) -> "Cache":
        """The cache of the K sentences `rows`; a sentence may come several times."""

        def take(tree: Any) -> Any:
            return jax.tree.map(lambda x: take_rows_of(x, rows), tree)

        return self.replace(
            layers=self._change_parts(lambda part: part.take_rows(rows)),
            length=take(self.length),
            encoder_kv=tuple(kv.take_rows(rows) for kv in self.encoder_kv),
            padding_mask=take(self.padding_mask),
            beam_ancestors=take(self.beam_ancestors),
        )

    def put_rows(self, rows: Int[AnyArray, " K"], new: "Cache") -> "Cache":
        """The cache with the K sentences of `new` in `rows`; a row outside of it is left out.

        Raises `ValueError` for a length of all sentences: see `truncate`.
        """

        def put(tree: Any, new: Any) -> Any:
            return jax.tree.map(lambda x, y: put_rows_into(x, rows, y), tree, new)

        pairs = zip(self.encoder_kv, new.encoder_kv, strict=True)
        return self.replace(
            layers=self._change_parts(lambda part, other: part.put_rows(rows, other), new),
            length=put(self.length, new.length),
            encoder_kv=tuple(kv.put_rows(rows, other) for kv, other in pairs),
            padding_mask=put(self.padding_mask, new.padding_mask),
            beam_ancestors=put(self.beam_ancestors, new.beam_ancestors),
        )

    def truncate(self, lengths: Int[Array, " B"] | Int[Array, ""]) -> "Cache":
        """The cache with the first `lengths` tokens of each sentence."""
        return self.replace(length=lengths)

    def parts(self) -> list[Any]:
        """The parts of all layers: each `LayerCache` and `LayerState`.

        Raises `ConfigError` for an array of a layer that is in none of them.
        """
        parts = jax.tree.leaves(self.layers, is_leaf=_is_part)
        for part in parts:
            if not _is_part(part):
                raise ConfigError(
                    f"a layer's cache has a {type(part).__name__} that does not know how beams and "
                    "sentences move: keep it as a field [B, W, ...] of a class derived from "
                    "jf.LayerState"
                )
        return parts

    def _change_parts(self, change: Callable[..., Any], *more: "Cache") -> tuple[Any, ...]:
        """The layers with `change(part)` in the place of each part.

        It also gets the parts of the caches `more` in the same place. Stacked layers are changed
        together.
        """
        self.parts()  # refuses what is no part
        change = jax.vmap(change) if self.is_stacked else change
        layers = (cache.layers for cache in (self, *more))
        return jax.tree.map(change, *layers, is_leaf=_is_part)

    def check_room(self, count: int) -> None:
        """Raises `ValueError` if `count` more tokens do not fit.

        While tracing, `length` is unknown: then only `count` itself is compared with the room.
        """
        length = 0 if isinstance(self.length, Tracer) else int(np.asarray(self.length).max())
        if length + count > self.max_length:
            raise ValueError(
                f"{count} more tokens were given to a cache with {length} of max_length="
                f"{self.max_length}: give a larger max_length to init_cache"
            )


def _is_part(node: Any) -> bool:
    """Whether `node` of a layer's cache is moved as a whole."""
    return isinstance(node, LayerCache | LayerState)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


for _kind in (LayerCache, Cache):  # so that `jax.export` can write a step of decoding
    # A name belongs to the first class: a notebook may import this module again.
    with suppress(ValueError):
        jax.export.register_pytree_node_serialization(
            _kind,
            serialized_name=f"jaxformer.{_kind.__name__}",
            serialize_auxdata=lambda static: json.dumps(static).encode(),
            deserialize_auxdata=lambda text: _as_tuples(json.loads(text)),
        )


def init_cache(
    config: TransformerConfig,
    batch_size: int,
    num_beams: int,
    max_length: int,
    layers: tuple[Any, ...],
) -> Cache:
    """An empty cache for `batch_size` x `num_beams` sequences of up to `max_length` tokens.

    `layers` are the empty parts of the decoder's layers, as `Stack.init_layers` makes them. Raises
    `ValueError` when learned positions end before `max_length`.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=3)
    >>> layer = empty_layer(config, batch_size=5, num_beams=1, max_length=7)
    >>> cache = init_cache(config, 5, num_beams=1, max_length=7, layers=(layer,) * 3)
    >>> len(cache.layers), cache.layers[0].key.shape  # [B, K, H, L] of each layer
    (3, (5, 2, 4, 7))
    """
    if isinstance(config.positions, Learned) and max_length > config.max_len:
        raise ValueError(
            f"a cache of max_length={max_length} tokens was asked for, but the learned positions "
            f"end at max_len={config.max_len}: give a smaller max_length"
        )
    ancestors = None
    if num_beams > 1:
        shape = batch_size, num_beams, max_length
        ancestors = jnp.broadcast_to(_beam_numbers(num_beams), shape)
    return Cache(
        layers,
        length=0,
        max_length=max_length,
        slots=num_beams,
        is_stacked=config.scan_layers,
        beam_ancestors=ancestors,
    )


def empty_layer(
    config: TransformerConfig, batch_size: int, num_beams: int, max_length: int
) -> LayerCache:
    """The empty keys and values of a layer of the model of `config`."""
    return LayerCache.empty(
        batch_size,
        num_beams,
        max_length,
        kv_heads=config.kv_heads,
        key_size=config.key_size,
        value_size=config.value_size,
        dtype=config.dtype,
    )


def fold_beams(
    attention_fn: Callable[..., Float[Array, "B Q N Hv"]],
    q: Float[Array, "R T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    mask: AttentionMask,
    bias: Float[Array, "_ N Q S"] | None = None,
    **options: Any,
) -> Float[Array, "R T N Hv"]:
    """`attention_fn` of the queries of R = B*W rows on the keys and values of B sentences.

    The W rows of a sentence (its beams) become Q = W*T further queries of that sentence, so that
    its keys and values are not repeated. Mask and bias belong to the Q queries. Keys after the
    last query of a causal mask, such as the empty part of a cache, are left out where its offset is
    known while tracing. `options` are passed on.
    """
    beams = len(q) // max(len(k), 1) or 1
    folded = q.reshape(len(k), beams * q.shape[1], *q.shape[2:])
    queries, keys = folded.shape[1], k.shape[1]
    seen = mask.offset + queries if mask.causal and isinstance(mask.offset, int) else keys
    if 0 < seen < keys:
        k, v, mask = k[:, :seen], v[:, :seen], mask.slice(0, queries, 0, seen)
        bias = None if bias is None else bias[..., :seen]
    heads = attention_fn(folded, k, v, mask, bias=bias, **options)
    return heads.reshape(*q.shape[:3], heads.shape[-1])


def _beam_numbers(beams: int) -> Int[Array, "1 W 1"]:
    """The slot that each of `beams` beams writes to: its number."""
    return jnp.arange(beams, dtype=jnp.int32)[None, :, None]
