"""The three families of the field, made of one block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer import cache as caches
from jaxformer.blocks import Block, MakeBlock, Stack
from jaxformer.cache import Cache
from jaxformer.config import TransformerConfig
from jaxformer.dropout import Noise
from jaxformer.kernels import Kernel, reference
from jaxformer.layers import Embedding, Output, dense_init
from jaxformer.losses import Readout
from jaxformer.masks import Mask


class EncoderDecoder(nn.Module):
    """The Transformer of Vaswani et al. 2017: an encoder, and a decoder that attends to it.

    `model.apply({"params": params}, source, target)` gives the logits for training;
    `method="start"` and `method="extend"` are the two halves of cached decoding.
    """

    config: TransformerConfig
    kernel: Kernel = reference
    block: MakeBlock = Block

    def setup(self):
        config = self.config
        self.embedding = Embedding(config.vocab_size, config)
        if not config.ties_inputs:
            size = config.source_vocab_size or config.vocab_size
            self.source_embedding = Embedding(size, config)
        self.output = Output(config)
        self.encoder = Stack(config, config.num_encoder_layers, False, self.kernel, self.block)
        self.decoder = Stack(config, config.num_decoder_layers, True, self.kernel, self.block)

    def __call__(
        self,
        source: jax.Array,
        target: jax.Array,
        source_valid: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> jax.Array:
        """Logits [B, T, V] for the token after each of `target` [B, T], given `source` [B, S].

        `source_valid` [B, S] is False at padding; None means there is none. Padding at the end
        of `target` changes nothing before it. `noise` None means no dropout.
        """
        return self.readout(source, target, source_valid, noise=noise).logits()

    def readout(
        self,
        source: jax.Array,
        target: jax.Array,
        source_valid: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> Readout:
        """The logits of `__call__`, not multiplied out."""
        memory = self.encode(source, source_valid, noise=noise)
        x, _ = self.decoder(
            self.embedding(target),
            Mask(causal=True),
            memory=self.decoder.memory_keys_values(memory),
            memory_mask=Mask(key_valid=source_valid),
            noise=noise,
        )
        return self.output.readout(x, self.embedding)

    def encode(
        self,
        source: jax.Array,
        source_valid: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> jax.Array:
        """The encoder's output [B, S, D] for `source` [B, S]."""
        tied = self.config.ties_inputs
        x = self.embedding(source) if tied else self.source_embedding(source)
        memory, _ = self.encoder(x, Mask(key_valid=source_valid), noise=noise)
        return memory

    def start(
        self,
        source: jax.Array,
        source_valid: jax.Array | None = None,
        *,
        length: int,
        hypotheses: int = 1,
    ) -> Cache:
        """An empty cache for `hypotheses` targets of up to `length` tokens for each `source`.

        The source [B, S] is encoded, and its keys and values projected, once.
        """
        memory = self.decoder.memory_keys_values(self.encode(source, source_valid))
        cache = caches.init(self.config, source.shape[0], hypotheses, length)
        memory = tuple(caches.store(kv) for kv in memory)
        return cache.replace(memory=memory, memory_valid=source_valid)

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits [B, W, T, V] after each of `tokens` [B, W, T], and the cache with them in."""
        x, cache = self.decoder(
            self.embedding(_rows(tokens)),
            Mask(causal=True, offset=cache.index),
            cache=cache,
            memory=tuple(caches.read(stored) for stored in cache.memory),
            memory_mask=Mask(key_valid=cache.memory_valid),
        )
        return self.output(x, self.embedding).reshape(*tokens.shape, -1), cache


class DecoderOnly(nn.Module):
    """A causal language model (GPT)."""

    config: TransformerConfig
    kernel: Kernel = reference
    block: MakeBlock = Block

    def setup(self):
        config = self.config
        self.embedding = Embedding(config.vocab_size, config)
        self.output = Output(config)
        self.decoder = Stack(config, config.num_decoder_layers, False, self.kernel, self.block)

    def __call__(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> jax.Array:
        """Logits [B, T, V] for the token after each of `tokens` [B, T].

        Packed documents: `segments` [B, T] numbers them, so that no token sees another's, and
        `positions` [B, T] count anew in each.
        """
        return self.readout(tokens, segments, positions, noise=noise).logits()

    def readout(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> Readout:
        """The logits of `__call__`, not multiplied out."""
        hidden = self.hidden(tokens, segments, positions, noise=noise)
        return self.output.readout(hidden, self.embedding)

    def hidden(
        self,
        tokens: jax.Array,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> jax.Array:
        """The vectors [B, T, D] from which `__call__` makes its logits."""
        mask = Mask(causal=True, query_segments=segments, key_segments=segments)
        x, _ = self.decoder(self.embedding(tokens), mask, positions=positions, noise=noise)
        return x

    def summary(
        self, tokens: jax.Array, present: jax.Array, *, noise: Noise | None = None
    ) -> jax.Array:
        """One vector [B, D] a text: that of its last token; `present` [B, T], padding last."""
        last = jnp.maximum(jnp.sum(present, axis=-1, dtype=jnp.int32) - 1, 0)
        hidden = self.hidden(tokens, noise=noise)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

    def start(
        self,
        batch: int,
        *,
        length: int,
        hypotheses: int = 1,
        begins: jax.Array | None = None,
    ) -> Cache:
        """An empty cache for `batch` x `hypotheses` texts of up to `length` tokens.

        `begins` [B]: how many padding tokens will come before each text, so that texts of
        different lengths end in the same slot. They are counted in `length`, and nothing
        attends to them.
        """
        return caches.init(self.config, batch, hypotheses, length).replace(begins=begins)

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits [B, W, T, V] after each of `tokens` [B, W, T], and the cache with them in."""
        positions = cache.positions(tokens.shape[-1])
        x = self.embedding(_rows(tokens))
        x, cache = self.decoder(x, cache.mask(), positions=positions, cache=cache)
        return self.output(x, self.embedding).reshape(*tokens.shape, -1), cache


class Encoding(NamedTuple):
    """What an encoder says of a text: each token's vector, and the pooled first one's."""

    hidden: jax.Array  # [B, T, D]
    pooled: jax.Array | None  # [B, D]


class EncoderOnly(nn.Module):
    """A bidirectional encoder (BERT)."""

    config: TransformerConfig
    kernel: Kernel = reference
    block: MakeBlock = Block

    def setup(self):
        config = self.config
        self.embedding = Embedding(config.vocab_size, config)
        if config.num_token_types:
            self.type_embedding = Embedding(config.num_token_types, config)
        self.encoder = Stack(config, config.num_encoder_layers, False, self.kernel, self.block)
        if config.pooler:
            self.pooler = nn.Dense(
                config.d_model, dtype=config.dtype, kernel_init=dense_init(config)
            )

    def __call__(
        self,
        tokens: jax.Array,
        valid: jax.Array | None = None,
        types: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> Encoding:
        """The encoding of `tokens` [B, T]; `valid` [B, T] is False at padding.

        `types` [B, T] (which of two sentences) defaults to 0.
        """
        x = self.embedding(tokens)
        if self.config.num_token_types:
            x = x + self.type_embedding(jnp.zeros_like(tokens) if types is None else types)
        hidden, _ = self.encoder(x, Mask(key_valid=valid), noise=noise)
        pooled = jnp.tanh(self.pooler(hidden[:, 0])) if self.config.pooler else None
        return Encoding(hidden, pooled)

    def summary(
        self, tokens: jax.Array, present: jax.Array, *, noise: Noise | None = None
    ) -> jax.Array:
        """One vector [B, D] a text: the pooled one, or without a pooler the first token's."""
        hidden, pooled = self(tokens, present, noise=noise)
        return hidden[:, 0] if pooled is None else pooled

    def readout(self, x: jax.Array, bias: jax.Array) -> Readout:
        """`x` [..., D] against every row of the token embedding, not multiplied out."""
        return Readout(x, self.embedding.table.T, bias)


def _rows(tokens: jax.Array) -> jax.Array:
    return tokens.reshape(-1, tokens.shape[-1])
