"""What a decoder remembers between steps: the keys and values of the tokens so far."""

import jax
import jax.numpy as jnp
from flax import struct

from jaxformer.config import TransformerConfig
from jaxformer.masks import Mask


@struct.dataclass
class KeysValues:
    """Keys [..., S, K, H] and values [..., S, K, Hv] of S tokens."""

    key: jax.Array
    value: jax.Array


@struct.dataclass
class Cache:
    """The state of decoding B sentences with W hypotheses each.

    `layers`: each decoder layer's keys and values [B, W, L, K, H] of the tokens so far, with
    room for L. `index`: how many tokens are in. `begins` [B]: how many of them are padding in
    front of the sentence (None: none). `memory`: each layer's keys and values [B, S, K, H] of
    the encoded source, held once a sentence and never reordered (empty without an encoder);
    `memory_valid` [B, S].
    """

    layers: tuple[KeysValues, ...]
    index: jax.Array
    memory: tuple[KeysValues, ...] = ()
    memory_valid: jax.Array | None = None
    begins: jax.Array | None = None

    def mask(self) -> Mask:
        """What the next tokens [B*W, T] may see of the slots [L]: those before, no padding."""
        if self.begins is None:
            return Mask(causal=True, offset=self.index)
        hypotheses, length = self.layers[0].key.shape[1:3]
        real = jnp.arange(length)[None] >= self.begins[:, None]
        return Mask(causal=True, offset=self.index, key_valid=real.repeat(hypotheses, axis=0))

    def positions(self, count: int) -> jax.Array:
        """Where the next `count` tokens stand in their sentences, [T] or [B*W, T]."""
        slots = self.index + jnp.arange(count)
        if self.begins is None:
            return slots
        hypotheses = self.layers[0].key.shape[1]
        # Padding has no place; 0 keeps it inside the table.
        return jnp.maximum(slots[None] - self.begins[:, None], 0).repeat(hypotheses, axis=0)

    def select(self, parents: jax.Array) -> "Cache":
        """The cache whose hypothesis w continues what hypothesis `parents[b, w]` was.

        `parents` [B, W'] int32; W' may differ from W.
        """

        def select_leaf(leaf: jax.Array) -> jax.Array:
            return jnp.take_along_axis(leaf, parents[:, :, None, None, None], axis=1)

        return self.replace(layers=jax.tree.map(select_leaf, self.layers))


def init(config: TransformerConfig, batch: int, hypotheses: int, length: int) -> Cache:
    """An empty cache for `batch` x `hypotheses` sequences of up to `length` tokens.

    Raises `ValueError` when learned positions end before `length`.
    """
    if config.positions == "learned" and length > config.max_len:
        raise ValueError(
            f"a cache of {length} tokens was asked for, but the learned positions end at max_len="
            f"{config.max_len}: ask for a shorter one"
        )
    shape = (batch, hypotheses, length, config.kv_heads)
    layer = KeysValues(
        jnp.zeros((*shape, config.key_size), config.dtype),
        jnp.zeros((*shape, config.value_size), config.dtype),
    )
    layers = tuple(jax.tree.map(jnp.copy, layer) for _ in range(config.num_decoder_layers))
    return Cache(layers, jnp.zeros((), jnp.int32))


def write(past: KeysValues, new: KeysValues, index: jax.Array) -> KeysValues:
    """`past` [B, W, L, ...] with `new` [B*W, T, ...] written at positions index .. index + T."""

    def write_leaf(old: jax.Array, fresh: jax.Array) -> jax.Array:
        fresh = fresh.reshape(*old.shape[:2], *fresh.shape[1:])
        return jax.lax.dynamic_update_slice_in_dim(old, fresh, index, axis=2)

    return jax.tree.map(write_leaf, past, new)


def read(past: KeysValues) -> KeysValues:
    """All places of `past` [B, W, L, ...], as keys and values [B*W, L, ...] to attend to."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), past)
