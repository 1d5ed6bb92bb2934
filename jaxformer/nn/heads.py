"""Models with a task: a masked language model, classifiers, and the span of an answer."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config import TransformerConfig
from jaxformer.config.checks import Count
from jaxformer.errors import ConfigError
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.nn.dense import Dense
from jaxformer.nn.dropout import Dropout
from jaxformer.nn.embeddings import softcap
from jaxformer.nn.models import EncoderOnly, Model, Tokens
from jaxformer.nn.norm import Norm
from jaxformer.nn.recipe import initializers
from jaxformer.nn.taps import tap
from jaxformer.ops.activations import find_activation
from jaxformer.ops.dense import add_bias, logits_matmul
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AnyArray


class MaskedLMOutput(NamedTuple):
    """The output of a masked language model, for P positions or all T."""

    logits: Float[Array, "B P V"]
    """Logits at each position."""
    next_sentence: Float[Array, "B 2"] | None
    """Logits of the second sentence following the first; None without a pooler."""


class MaskedLanguageModel(Model):
    """An encoder with the heads that BERT is pretrained with (Devlin et al. 2019, section 3.1).

    The token head is a dense layer, the activation, a norm, and the embedding's transpose with a
    bias. With `config.pooler` a second head tells whether sentence B follows sentence A.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1)
    >>> model = jf.MaskedLanguageModel(config)
    >>> tokens, positions = jnp.ones((2, 7), int), jnp.array([[1, 3, 6], [0, 2, 5]])
    >>> output, _ = jax.eval_shape(
    ...     lambda: model.init_with_output(jax.random.key(0), tokens, masked_positions=positions)
    ... )
    >>> output.logits.shape  # [B, P, V]: only masked positions
    (2, 3, 11)
    """

    def setup(self) -> None:
        config = self.config
        if config.output.bias is False:
            raise ConfigError(
                "output.bias=False, but the logits of a masked model have a bias: leave it out"
            )
        self.encoder: EncoderOnly = EncoderOnly(config, self.attention_fn, self.block)
        init, _ = initializers(config)
        self.transform: Dense = Dense(config.d_model, dtype=config.dtype, kernel_init=init)
        norm = config.norm
        self.transform_norm: Norm = Norm(norm.kind, norm.eps, config.use_bias)
        shape = (config.vocab_size,)
        self.bias: Array = self.param("bias", nn.initializers.zeros, shape, jnp.float32)
        if config.pooler != "none":
            self.next_sentence: Dense = Dense(2, dtype=config.dtype, kernel_init=init)

    def __call__(
        self,
        tokens: Tokens,
        padding_mask: Bool[AnyArray, "B T"] | None = None,
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        masked_positions: Int[AnyArray, "B P"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> MaskedLMOutput:
        """The logits at `masked_positions` of `tokens`, or at all positions.

        `padding_mask` is True at real tokens, `token_type_ids` tell the two sentences apart.
        """
        encoded = self.encoder(tokens, padding_mask, token_type_ids, dropout_rng=dropout_rng)
        logits = self.lm_head(take_positions(encoded.hidden, masked_positions))
        pooled = encoded.pooled
        return MaskedLMOutput(logits, None if pooled is None else self.next_sentence(pooled))

    def hidden(
        self,
        tokens: Tokens,
        padding_mask: Bool[AnyArray, "B T"] | None = None,
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        masked_positions: Int[AnyArray, "B P"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B P D"]:
        """The encoder's output, from which `lm_head` makes the logits of `__call__`."""
        encoded = self.encoder(tokens, padding_mask, token_type_ids, dropout_rng=dropout_rng)
        return take_positions(encoded.hidden, masked_positions)

    def lm_head(self, hidden: Float[Array, "*shape D"]) -> Float[Array, "*shape V"]:
        """The logits of `hidden` vectors."""
        activation = find_activation(self.config.feed_forward.activation)
        x = self.transform_norm(activation(self.transform(hidden)))
        logits = add_bias(logits_matmul(x, self.encoder.embedding.table.T), self.bias)
        cap = self.config.output.softcap
        return tap(self, "logits", logits if cap is None else softcap(logits, cap))


class Classifier(CheckedModule):
    """A dense layer on the backbone's `pooled` vector of each text.

    `pooling` "token" takes one token's vector: a decoder's of the last token, an encoder's of the
    first one (or of its pooler). "mean" takes the mean of the tokens' vectors, which is often
    better where a few examples are learned. `backbone` is an `EncoderOnly`, a `DecoderOnly`, or any
    module with a `config` and a method `pooled` like theirs. `use_bias=False` leaves out the bias
    of the head, which classifiers on decoders lack in `transformers`.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1)
    >>> model = jf.Classifier(jf.EncoderOnly(config), classes=3)
    >>> tokens, real = jnp.ones((2, 5), int), jnp.ones((2, 5), bool)
    >>> logits, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), tokens, real)
    >>> logits.shape, variables["params"]["head"]["kernel"].shape
    ((2, 3), (8, 3))
    """

    backbone: nn.Module
    classes: Count
    pooling: Literal["token", "mean"] = "token"
    use_bias: bool = True

    @nn.compact
    def __call__(
        self,
        tokens: Tokens,
        padding_mask: Bool[AnyArray, "B T"],
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B C"]:
        """The logits of the C classes; `padding_mask` is True at real tokens, which come first.

        `token_type_ids` tell two sentences apart, where the backbone is an encoder that does.
        """
        types = () if token_type_ids is None else (token_type_ids,)
        mean = {"mean": True} if self.pooling == "mean" else {}  # a backbone may have no mean
        x = self.backbone.pooled(tokens, padding_mask, *types, **mean, dropout_rng=dropout_rng)
        x = Dropout(self.backbone.config.dropout_rate, "summary")(x, dropout_rng)
        return dense_head(self.backbone.config, self.classes, use_bias=self.use_bias)(x)


class TokenClassifier(CheckedModule):
    """A dense layer on the vector of each token, for names, parts of speech and the like.

    `backbone` is an `EncoderOnly`, or any module with a `config` that returns what it does (Devlin
    et al. 2019, section 5.3).

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1)
    >>> model = jf.TokenClassifier(jf.EncoderOnly(config), classes=3)
    >>> tokens, real = jnp.ones((2, 5), int), jnp.ones((2, 5), bool)
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), tokens, real)[0].shape
    (2, 5, 3)
    """

    backbone: nn.Module
    classes: Count

    @nn.compact
    def __call__(
        self,
        tokens: Tokens,
        padding_mask: Bool[AnyArray, "B T"],
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B T C"]:
        """The logits of the C classes of each token; arguments as of `EncoderOnly`."""
        x = self.backbone(tokens, padding_mask, token_type_ids, dropout_rng=dropout_rng).hidden
        x = Dropout(self.backbone.config.dropout_rate, "hidden")(x, dropout_rng)
        return dense_head(self.backbone.config, self.classes)(x)


class SpanPredictor(CheckedModule):
    """A dense layer that gives each token's logits of being the first and the last of an answer.

    `backbone` is as in `TokenClassifier` (Devlin et al. 2019, section 4.2).

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_encoder_layers=1)
    >>> model = jf.SpanPredictor(jf.EncoderOnly(config))
    >>> tokens, real = jnp.ones((2, 5), int), jnp.ones((2, 5), bool)
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), tokens, real)[0].shape
    (2, 2, 5)
    """

    backbone: nn.Module

    @nn.compact
    def __call__(
        self,
        tokens: Tokens,
        padding_mask: Bool[AnyArray, "B T"],
        token_type_ids: Int[AnyArray, "B T"] | None = None,
        *,
        dropout_rng: DropoutRng | Array | None = None,
    ) -> Float[Array, "B 2 T"]:
        """The logits of each token as the start and as the end; arguments as of `EncoderOnly`."""
        x = self.backbone(tokens, padding_mask, token_type_ids, dropout_rng=dropout_rng).hidden
        return jnp.swapaxes(dense_head(self.backbone.config, 2)(x), 1, 2)


def dense_head(config: TransformerConfig, size: int, *, use_bias: bool = True) -> Dense:
    """The layer `head` of a task with `size` outputs."""
    init, _ = initializers(config)
    return Dense(size, use_bias=use_bias, dtype=config.dtype, kernel_init=init, name="head")


def take_positions(
    hidden: Float[Array, "B T D"], positions: Int[AnyArray, "B P"] | None
) -> Float[Array, "B P D"]:
    """The vectors at `positions`; None takes all."""
    return hidden if positions is None else jnp.take_along_axis(hidden, positions[..., None], 1)
