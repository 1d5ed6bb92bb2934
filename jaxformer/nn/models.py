"""The three families of Transformers, made of one block.

Arguments that are masks are True where attention is allowed. `dropout_rng` None means no dropout.
In place of ids [B, T] all models take vectors [B, T, D], in the size that `embedding(ids)` has.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.errors import ScopeCollectionNotFound
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.nn.blocks import Block
from jaxformer.nn.cache import Cache, LayerCache, empty_layer, init_cache
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.nn.dense import Dense
from jaxformer.nn.embeddings import Embedding, LMHead
from jaxformer.nn.recipe import initializers, make_embedding, make_stack
from jaxformer.nn.stack import Stack
from jaxformer.nn.taps import tap
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AnyArray, AttentionMask, as_padding_mask

Tokens = Int[AnyArray, "B T"] | Float[AnyArray, "B T D"]
"""Ids, or vectors in their place."""
Source = Int[AnyArray, "B S"] | Float[AnyArray, "B S D"]
"""The same, of a source."""


class Model(CheckedModule):
    """The base of all models: the recipe, and what is passed to each `Stack`."""

    config: TransformerConfig
    attention_fn: AttentionFn = reference
    block: Callable[..., nn.Module] = Block
    """block(**fields) makes each block, which is called as `Block` is, from the fields of that."""


class DecodingModel(Model):
    """The base of the models that decode."""

    _cross = False  # whether the decoder attends to an encoder

    def setup(self) -> None:
        config = self.config
        if config.pooler != "none" or config.embeddings.num_types:
            raise ConfigError(
                f"pooler={config.pooler!r} and embeddings.num_types={config.embeddings.num_types} "
                f"are of an encoder alone, but this is a {type(self).__name__}: leave them out"
            )
        zero_id = config.embeddings.zero_id
        self.embedding: Embedding = make_embedding(config, config.vocab_size, zero_id)
        kernel_init, _ = initializers(config)
        self.output: LMHead = LMHead(
            config.vocab_size, bool(config.output.bias), config.output.softcap, kernel_init
        )
        self.decoder: Stack = make_stack(
            config, config.num_decoder_layers, self._cross, self.attention_fn, self.block
        )

    def lm_head(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The logits of `hidden` vectors."""
        tied = self.embedding if self.config.ties_output else None
        return tap(self, "logits", self.output(hidden, tied))

    def empty_cache(self, batch_size: int, num_beams: int, max_length: int) -> Cache:
        """An empty cache without an encoder; each block makes what its layer keeps.

        A model without parameters has one too. Raises `ConfigError` where a block reads a parameter
        for it, or makes one in its `setup`.
        """
        if self.scope is None:
            try:
                return self.bind({}).empty_cache(batch_size, num_beams, max_length)
            except ScopeCollectionNotFound as error:
                raise ConfigError(
                    "a block of this model needs its parameters for an empty cache: give "
                    'model.bind({"params": params}).init_cache(...)'
                ) from error
        make_default = partial(empty_layer, self.config, batch_size, num_beams, max_length)
        layers = self.decoder.init_layers(
            make_default, batch_size, num_beams, max_length, self.config.d_model
        )
        return init_cache(self.config, batch_size, num_beams, max_length, layers)

    def decode_step(
        self, tokens: Int[AnyArray, "B W T"] | Float[AnyArray, "B W T D"], cache: Cache
    ) -> tuple[Float[Array, "B W T V"], Cache]:
        """The logits of the token after each of `tokens`, and the cache with `tokens` added.

        Raises `ValueError` if they do not fit into the cache. While tracing, only T itself can be
        compared with `cache.max_length`: the caller counts the tokens.
        """
        shape = tokens.shape[:3]
        x, cache = self.decoder.decode(self.embedding(tokens.reshape(-1, *tokens.shape[2:])), cache)
        return self.lm_head(x).reshape(*shape, -1), cache


class EncoderDecoder(DecodingModel):
    """The Transformer of Vaswani et al. 2017: an encoder, and a decoder that attends to it.

    `model.apply({"params": params}, source, target)` gives the logits for training;
    `method="init_cache"` and `method="decode_step"` are for decoding with a cache.

    >>> layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, **layers)
    >>> model = jf.EncoderDecoder(config)
    >>> source, target = jnp.ones((2, 7), int), jnp.ones((2, 5), int)
    >>> logits, variables = jax.eval_shape(
    ...     model.init_with_output, jax.random.key(0), source, target
    ... )
    >>> logits.shape  # [B, T, V]
    (2, 5, 11)
    >>> variables["params"]["embedding"]["table"].shape  # one table for source, target and output
    (11, 8)
    """

    _cross = True

    def setup(self) -> None:
        super().setup()
        config = self.config
        if not config.ties_inputs:
            size = config.source_vocab_size or config.vocab_size
            self.source_embedding: Embedding = make_embedding(config, size)
        self.encoder: Stack = make_stack(
            config, config.num_encoder_layers, False, self.attention_fn, self.block
        )

    def __call__(
        self,
        source: Source,
        target: Tokens,
        padding_mask: Bool[AnyArray, "B S"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of the token after each of `target`, given `source`.

        `padding_mask` is True at the source's real tokens; None means there is no padding. Padding
        at the end of `target` changes nothing before it.
        """
        return self.lm_head(self.hidden(source, target, padding_mask, dropout_rng=dropout_rng))

    def hidden(
        self,
        source: Source,
        target: Tokens,
        padding_mask: Bool[AnyArray, "B S"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B T D"]:
        """The decoder's output, from which `lm_head` makes the logits of `__call__`."""
        encoded = self.encode(source, padding_mask, dropout_rng=dropout_rng)
        return self.decoder(
            self.embedding(target),
            AttentionMask(causal=True),
            encoder_kv=self.decoder.encoder_keys_values(encoded),
            encoder_mask=AttentionMask(padding_mask=padding_mask),
            dropout_rng=dropout_rng,
        )

    def encode(
        self,
        source: Source,
        padding_mask: Bool[AnyArray, "B S"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output for `source`."""
        embedding = self.embedding if self.config.ties_inputs else self.source_embedding
        return self.encoder(embedding(source), padding_mask, dropout_rng=dropout_rng)

    def init_cache(
        self,
        source: Source,
        padding_mask: Bool[AnyArray, "B S"] | None = None,
        *,
        max_length: int,
        num_beams: int = 1,
    ) -> Cache:
        """An empty cache for `num_beams` targets of up to `max_length` tokens per sentence.

        The source is encoded, and its keys and values are projected, once.
        """
        encoder_kv = self.decoder.encoder_keys_values(self.encode(source, padding_mask))
        cache = self.empty_cache(source.shape[0], num_beams, max_length)
        create = LayerCache.create
        keep = jax.vmap(create) if self.config.scan_layers else create
        kept = tuple(keep(keys, values) for keys, values in encoder_kv)
        return cache.replace(encoder_kv=kept, padding_mask=as_padding_mask(padding_mask))


class DecoderOnly(DecodingModel):
    """A causal language model (GPT).

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.array([[1, 5, 7, 9]])
    >>> logits, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), tokens)
    >>> logits.shape  # [B, T, V]
    (1, 4, 11)
    """

    def __call__(
        self,
        tokens: Tokens,
        segments: Int[AnyArray, "B T"] | None = None,
        positions: Int[AnyArray, "B T"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of the token after each of `tokens`.

        For packed documents, `segments` numbers the documents, and no token sees another document.
        `positions` then count from 0 in each document.
        """
        return self.lm_head(self.hidden(tokens, segments, positions, dropout_rng=dropout_rng))

    def hidden(
        self,
        tokens: Tokens,
        segments: Int[AnyArray, "B T"] | None = None,
        positions: Int[AnyArray, "B T"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B T D"]:
        """The decoder's output, from which `lm_head` makes the logits of `__call__`."""
        x = self.embedding(tokens)
        mask = AttentionMask(causal=True, query_segments=segments, key_segments=segments)
        return self.decoder(x, mask, positions=positions, dropout_rng=dropout_rng)

    def pooled(
        self,
        tokens: Tokens,
        padding_mask: Bool[AnyArray, "B T"],
        *,
        mean: bool = False,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B D"]:
        """One vector per text: its last token's, or the `mean` of all.

        Padding must be at the end.
        """
        hidden = self.hidden(tokens, dropout_rng=dropout_rng)
        if mean:
            return mean_of_tokens(hidden, padding_mask)
        real = as_padding_mask(padding_mask)
        last = jnp.maximum(jnp.sum(real, axis=-1, dtype=jnp.int32) - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

    def init_cache(
        self,
        batch_size: int,
        *,
        max_length: int,
        num_beams: int = 1,
    ) -> Cache:
        """An empty cache for `batch_size` x `num_beams` texts of up to `max_length` tokens.

        Texts of different lengths are read with padding at their ends; `Cache.truncate` then gives
        each its own length.
        """
        return self.empty_cache(batch_size, num_beams, max_length)


def mean_of_tokens(
    hidden: Float[Array, "B T D"], padding_mask: Bool[AnyArray, "B T"]
) -> Float[Array, "B D"]:
    """The mean of the vectors of each text's real tokens; 0 for a text without any."""
    real = as_padding_mask(padding_mask)
    total = jnp.sum(jnp.where(real[..., None], hidden, 0), axis=1)
    return total / jnp.maximum(jnp.sum(real, axis=-1, keepdims=True), 1).astype(total.dtype)


class EncoderOutput(NamedTuple):
    """The output of an encoder."""

    hidden: Float[Array, "B T D"]
    """The vector of each token."""
    pooled: Float[Array, "B D"] | None
    """The pooler's output for the first token's vector; None without `config.pooler`."""


class EncoderOnly(Model):
    """A bidirectional encoder (BERT).

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1)
    >>> model, tokens = jf.EncoderOnly(config), jnp.ones((2, 5), int)
    >>> output, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), tokens)
    >>> output.hidden.shape, output.pooled
    ((2, 5, 8), None)
    """

    AXES: ClassVar[Mapping[str, str]] = {"type_embedding/table": "type -> embed"}

    def setup(self) -> None:
        config = self.config
        if config.window.size is not None:
            raise ConfigError(
                f"window.size={config.window.size}, but an encoder sees all tokens: "
                "leave it out, or build a DecoderOnly, whose attention is causal"
            )
        zero_id = config.embeddings.zero_id
        self.embedding: Embedding = make_embedding(config, config.vocab_size, zero_id)
        if config.embeddings.num_types:
            self.type_embedding: Embedding = make_embedding(config, config.embeddings.num_types)
        self.encoder: Stack = make_stack(
            config, config.num_encoder_layers, False, self.attention_fn, self.block
        )
        if config.pooler != "none":
            init, _ = initializers(config)
            self.pooler: Dense = Dense(config.d_model, dtype=config.dtype, kernel_init=init)

    def __call__(
        self,
        tokens: Tokens,
        padding_mask: Bool[AnyArray, "B T"] | None = None,
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> EncoderOutput:
        """The vectors of `tokens`; `padding_mask` is True at real tokens.

        `token_type_ids` (which of two sentences a token belongs to) default to 0.
        """
        x = self.embedding(tokens)
        if self.config.embeddings.num_types:
            zeros = jnp.zeros(tokens.shape[:2], jnp.int32)
            x = x + self.type_embedding(zeros if token_type_ids is None else token_type_ids)
        hidden = self.encoder(x, padding_mask, dropout_rng=dropout_rng)
        if self.config.pooler == "none":
            return EncoderOutput(hidden, None)
        activation = {"tanh": jnp.tanh, "relu": jax.nn.relu}[self.config.pooler]
        return EncoderOutput(hidden, activation(self.pooler(hidden[:, 0])))

    def pooled(
        self,
        tokens: Tokens,
        padding_mask: Bool[AnyArray, "B T"],
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        *,
        mean: bool = False,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B D"]:
        """One vector per text: the pooled one, or the first token's without a pooler, or the mean.

        The `mean` is over the real tokens.
        """
        hidden, pooled = self(tokens, padding_mask, token_type_ids, dropout_rng=dropout_rng)
        if mean:
            return mean_of_tokens(hidden, padding_mask)
        return hidden[:, 0] if pooled is None else pooled
