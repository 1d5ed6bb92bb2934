"""The state of decoding: the keys and values of the tokens so far, and of the encoded source."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.core import Tracer
from jaxtyping import Array, Int

from jaxformer.config import Learned, TransformerConfig
from jaxformer.ops import beam_cache
from jaxformer.ops.beam_cache import KeyValue, LayerCache
from jaxformer.ops.masks import AnyArray, AttentionMask


class Cache(struct.PyTreeNode):
    """The state of decoding B sentences with W beams each; a decoding step returns a new one.

    `layers`: the keys and values of each decoder layer, with room for L tokens of each beam. With
    `config.scan_layers` it has one element, whose arrays have a leading layer axis; so has
    `encoder_kv`.
    `length`: the number of tokens in the cache, the same for all beams.
    `encoder_kv`: each layer's keys and values of the encoded source, held once per sentence (empty
    without an encoder). `padding_mask` [B, S]: True at the source's real tokens.
    `left_padding` [B]: how many of the tokens are padding before the sentence; None: none.
    `beam_ancestors` [B, W, L]: which beam wrote token l of beam w; None: there is one beam.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> cache = init_cache(config, batch_size=2, num_beams=3, max_length=5)
    >>> cache.max_length, cache.num_beams, int(cache.length)
    (5, 3, 0)
    >>> cache.reorder_beams(jnp.array([[0, 1], [2, 2]])).num_beams  # two beams continue
    2
    """

    layers: tuple[LayerCache, ...]
    length: jax.Array
    encoder_kv: tuple[LayerCache, ...] = ()
    padding_mask: AnyArray | None = None
    left_padding: AnyArray | None = None
    beam_ancestors: jax.Array | None = None

    @property
    def max_length(self) -> int:
        """L, the number of tokens that fit."""
        return self.layers[0].max_length

    @property
    def num_beams(self) -> int:
        """W."""
        return 1 if self.beam_ancestors is None else self.beam_ancestors.shape[1]

    def mask(self) -> AttentionMask:
        """The mask [B*W, T, L] of the next T tokens: causal, without the padding before."""
        if self.left_padding is None:
            return AttentionMask(causal=True, offset=self.length)
        real = jnp.arange(self.max_length)[None] >= self.left_padding[:, None]
        return AttentionMask(
            causal=True, offset=self.length, padding_mask=real.repeat(self.num_beams, axis=0)
        )

    def mask_of_beams(self, mask: AttentionMask, count: int) -> AttentionMask:
        """`mask` of the next T = `count` tokens of each row, for the queries of all beams."""
        return beam_cache.mask_of_beams(mask, self.beam_ancestors, self.layers[0].slots, count)

    def bias_of_beams(self, bias: jax.Array | None) -> jax.Array | None:
        """`bias` [1, N, T, L] of one beam's queries, for the queries of all beams."""
        return beam_cache.bias_of_beams(bias, self.num_beams, self.layers[0].slots)

    def positions(self, count: int) -> Int[Array, " T"] | Int[Array, "R T"]:
        """The positions of the next T = `count` tokens in their sentences; R = B*W."""
        positions = self.length + jnp.arange(count)
        if self.left_padding is None:
            return positions
        # Padding has no position; 0 keeps it inside the table.
        positions = jnp.maximum(positions[None] - self.left_padding[:, None], 0)
        return positions.repeat(self.num_beams, axis=0)

    def advance(self, layers: tuple[LayerCache, ...], count: int) -> "Cache":
        """The cache with the blocks' `layers`, after `count` more tokens."""
        return self.replace(layers=layers, length=self.length + count)

    def reorder_beams(self, parents: Int[Array, "B W2"]) -> "Cache":
        """The cache in which beam w continues beam `parents[b, w]`.

        The number of beams may change. Keys and values do not move.
        """
        layers, beam_ancestors = beam_cache.reorder(
            self.layers, self.beam_ancestors, parents, self.length
        )
        return self.replace(layers=layers, beam_ancestors=beam_ancestors)

    def check_room(self, count: int) -> None:
        """Raises `ValueError` if `count` more tokens do not fit.

        While tracing, `length` is unknown: then only `count` itself is compared with the room.
        """
        length = 0 if isinstance(self.length, Tracer) else int(self.length)
        if length + count > self.max_length:
            raise ValueError(
                f"{count} more tokens were given to a cache with {length} of max_length="
                f"{self.max_length}: give a larger max_length to init_cache"
            )


def init_cache(
    config: TransformerConfig, batch_size: int, num_beams: int, max_length: int
) -> Cache:
    """An empty cache for `batch_size` x `num_beams` sequences of up to `max_length` tokens.

    Raises `ValueError` when learned positions end before `max_length`.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=3)
    >>> cache = init_cache(config, batch_size=5, num_beams=1, max_length=7)
    >>> len(cache.layers), cache.layers[0].key.shape  # [B, K, H, L] of each layer
    (3, (5, 2, 4, 7))
    """
    if isinstance(config.positions, Learned) and max_length > config.max_len:
        raise ValueError(
            f"a cache of max_length={max_length} tokens was asked for, but the learned positions "
            f"end at max_len={config.max_len}: give a smaller max_length"
        )
    shape = batch_size, max_length * num_beams, config.kv_heads
    sizes = config.key_size, config.value_size
    zeros = KeyValue(*(jnp.zeros((*shape, size), config.dtype) for size in sizes))
    layer = beam_cache.store(zeros, slots=num_beams)
    count = config.num_decoder_layers
    if config.scan_layers:
        layers = (jax.tree.map(lambda leaf: jnp.stack([leaf] * count), layer),)
    else:
        layers = tuple(jax.tree.map(jnp.copy, layer) for _ in range(count))
    ancestors = None
    if num_beams > 1:
        own = beam_cache.own_slots(num_beams)
        ancestors = jnp.broadcast_to(own, (batch_size, num_beams, max_length))
    return Cache(layers, jnp.zeros((), jnp.int32), beam_ancestors=ancestors)
