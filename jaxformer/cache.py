"""What a decoder remembers between steps: the keys and values of the tokens so far."""

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import TransformerConfig
from jaxformer.masks import Mask


@struct.dataclass
class KeysValues:
    """Keys [B, S, K, H] and values [B, S, K, Hv] of S tokens.

    With `ancestors` [B, W, L] they are those of several hypotheses: S is L x slots, and token l of
    hypothesis w's text is the one in place l, slot `ancestors[b, w, l]`.
    """

    key: jax.Array
    value: jax.Array
    ancestors: jax.Array | None = None

    def spread(
        self, mask: Mask, bias: jax.Array | None, queries: int
    ) -> tuple[Mask, jax.Array | None]:
        """What `mask` and `bias` say of a text's T queries and L places, for rows and all S keys.

        Their batch is B*W and their queries T = `queries`; those of the results B and W*T.
        """
        if self.ancestors is None:
            return mask, bias
        batch, hypotheses, length = self.ancestors.shape
        slots = self.key.shape[1] // length
        pairs = self.ancestors[..., None] == jnp.arange(slots)[None, None, None]
        pairs = pairs[:, :, None]  # [B, W, 1, L, slots]
        seen = mask.dense(queries, length)
        if seen is not None:
            seen = jnp.broadcast_to(seen, (batch * hypotheses, 1, queries, length))
            pairs = pairs & seen.reshape(batch, hypotheses, queries, length, 1)
        pairs = pairs.reshape(batch, hypotheses * queries, -1)
        if bias is not None:
            bias = jnp.tile(jnp.repeat(bias, slots, axis=-1), (hypotheses, 1))
        return Mask(pairs=pairs), bias


@struct.dataclass
class Stored:
    """Keys [B, K, H, S] and values [B, K, S, Hv] as attention multiplies them; see `KeysValues`.

    Axes B and K of size 1 are left out, `groups` are the sizes of both: XLA leaves such axes out of
    a product, and a loop that kept an array with them would copy it at every step.
    """

    key: jax.Array
    value: jax.Array
    groups: tuple[int, int] = struct.field(pytree_node=False)
    ancestors: jax.Array | None = None

    @property
    def length(self) -> int:
        """For how many tokens of a text there is room."""
        return self.key.shape[-1] if self.ancestors is None else self.ancestors.shape[2]


@struct.dataclass
class Cache:
    """The state of decoding B sentences with W hypotheses each.

    `layers`: each decoder layer's keys and values of the tokens so far, with room for L tokens of
    each hypothesis. They stay where they were written; `ancestors` [B, W, L] says which hypothesis
    has written token l of hypothesis w's text (None: there is one). `index`: how many tokens are
    in. `begins` [B]: how many of them are padding in front of the sentence (None: none). `memory`:
    each layer's keys and values of the encoded source, held once a sentence (empty without an
    encoder); `memory_valid` [B, S].
    """

    layers: tuple[Stored, ...]
    index: jax.Array
    memory: tuple[Stored, ...] = ()
    memory_valid: jax.Array | None = None
    begins: jax.Array | None = None
    ancestors: jax.Array | None = None

    @property
    def length(self) -> int:
        """L, for how many tokens there is room."""
        return self.past(0).length

    @property
    def hypotheses(self) -> int:
        """W."""
        return 1 if self.ancestors is None else self.ancestors.shape[1]

    def mask(self) -> Mask:
        """What the next tokens [B*W, T] may see of the places [L]: those before, no padding."""
        if self.begins is None:
            return Mask(causal=True, offset=self.index)
        real = jnp.arange(self.length)[None] >= self.begins[:, None]
        return Mask(causal=True, offset=self.index, key_valid=real.repeat(self.hypotheses, axis=0))

    def positions(self, count: int) -> jax.Array:
        """Where the next `count` tokens stand in their sentences, [T] or [B*W, T]."""
        places = self.index + jnp.arange(count)
        if self.begins is None:
            return places
        # Padding has no place; 0 keeps it inside the table.
        return jnp.maximum(places[None] - self.begins[:, None], 0).repeat(self.hypotheses, axis=0)

    def past(self, layer: int) -> Stored:
        """What the block number `layer` is given, to `write` to and `read`."""
        return self.layers[layer].replace(ancestors=self.ancestors)

    def extended(self, pasts: tuple[Stored, ...], count: int) -> "Cache":
        """The cache of what the blocks have returned, `count` tokens on."""
        layers = tuple(past.replace(ancestors=None) for past in pasts)
        return self.replace(layers=layers, index=self.index + count)

    def select(self, parents: jax.Array) -> "Cache":
        """The cache whose hypothesis w continues what hypothesis `parents[b, w]` was.

        `parents` [B, W'] int32; W' may differ from W. Keys and values do not move.
        """
        batch, count = parents.shape
        ancestors = self.ancestors
        if ancestors is None:
            if count == 1:
                return self
            ancestors = jnp.zeros((batch, 1, self.length), jnp.int32)
        taken = jnp.take_along_axis(ancestors, parents[:, :, None], axis=1)
        written = jnp.arange(self.length)[None, None] < self.index
        ancestors = jnp.where(written, taken, _own(count))
        layers = self.layers
        if count * self.length > layers[0].key.shape[-1]:
            layers = tuple(_with_room(layer, self.length, count) for layer in layers)
        return self.replace(layers=layers, ancestors=ancestors)


def init(config: TransformerConfig, batch: int, hypotheses: int, length: int) -> Cache:
    """An empty cache for `batch` x `hypotheses` sequences of up to `length` tokens.

    Raises `ValueError` when learned positions end before `length`.
    """
    if config.positions == "learned" and length > config.max_len:
        raise ValueError(
            f"a cache of {length} tokens was asked for, but the learned positions end at max_len="
            f"{config.max_len}: ask for a shorter one"
        )
    shape = batch, length * hypotheses, config.kv_heads
    sizes = config.key_size, config.value_size
    layer = store(KeysValues(*(jnp.zeros((*shape, size), config.dtype) for size in sizes)))
    layers = tuple(jax.tree.map(jnp.copy, layer) for _ in range(config.num_decoder_layers))
    ancestors = jnp.broadcast_to(_own(hypotheses), (batch, hypotheses, length))
    index = jnp.zeros((), jnp.int32)
    return Cache(layers, index, ancestors=ancestors if hypotheses > 1 else None)


def store(kv: KeysValues) -> Stored:
    """`kv` in the layout that is kept."""
    key, value = kv.key.transpose(0, 2, 3, 1), kv.value.swapaxes(1, 2)
    ones = tuple(axis for axis in (0, 1) if key.shape[axis] == 1)
    return Stored(key.squeeze(ones), value.squeeze(ones), key.shape[:2], kv.ancestors)


def read(stored: Stored) -> KeysValues:
    """All that is stored, to attend to."""
    leaves = stored.key, stored.value
    key, value = (leaf.reshape(*stored.groups, *leaf.shape[-2:]) for leaf in leaves)
    return KeysValues(key.transpose(0, 3, 1, 2), value.swapaxes(1, 2), stored.ancestors)


def write(past: Stored, new: KeysValues, index: jax.Array) -> Stored:
    """`past` with the keys [B*W, T, K, H] and values of `new` at places index .. index + T."""
    slots = past.key.shape[-1] // past.length

    def laid(leaf: jax.Array) -> jax.Array:
        """[B*W, T, K, H] as [B, T * slots, K, H]."""
        leaf = leaf.reshape(past.groups[0], -1, *leaf.shape[1:]).swapaxes(1, 2)
        leaf = _padded(leaf, 2, slots)
        return leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:])

    fresh, at = store(KeysValues(laid(new.key), laid(new.value))), index * slots
    key = jax.lax.dynamic_update_slice_in_dim(past.key, fresh.key, at, axis=-1)
    value = jax.lax.dynamic_update_slice_in_dim(past.value, fresh.value, at, axis=-2)
    return past.replace(key=key, value=value)


def _with_room(layer: Stored, length: int, slots: int) -> Stored:
    """`layer`, of `length` places, with `slots` slots at each."""

    def padded(leaf: jax.Array, axis: int) -> jax.Array:
        shape = leaf.shape
        places = leaf.reshape(*shape[:axis], length, -1, *shape[axis + 1 :])
        return _padded(places, axis + 1, slots).reshape(*shape[:axis], -1, *shape[axis + 1 :])

    last = layer.key.ndim - 1
    return layer.replace(key=padded(layer.key, last), value=padded(layer.value, last - 1))


def _padded(leaf: jax.Array, axis: int, size: int) -> jax.Array:
    """`leaf` with zeros behind, until `axis` has at least `size`."""
    widths = [(0, 0)] * leaf.ndim
    widths[axis] = (0, max(size - leaf.shape[axis], 0))
    return jnp.pad(leaf, widths)


def _own(count: int) -> jax.Array:
    """Each of `count` hypotheses' own number, [1, W, 1]."""
    return jnp.arange(count, dtype=jnp.int32)[None, :, None]
