"""What stands on a model to give it a task: filling in masked tokens, classifying texts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.blocks import Block, MakeBlock
from jaxformer.config import TransformerConfig
from jaxformer.dropout import Dropout, Noise
from jaxformer.kernels import Kernel, reference
from jaxformer.layers import ACTIVATIONS, Norm, dense_init
from jaxformer.losses import Readout
from jaxformer.models import EncoderOnly, Encoding


class Filling(NamedTuple):
    """What a masked language model says of a text."""

    logits: jax.Array | Readout  # [B, P, V]: which token stands there
    follows: jax.Array | None  # [B, 2]: whether the second sentence follows the first


class MaskedLanguageModel(nn.Module):
    """An encoder with the heads that BERT is pretrained with (Devlin et al. 2019, section 3.1).

    The token head is a dense layer, the activation, a norm, and the embedding's transpose with a
    bias. With `config.pooler` a second head tells whether sentence B follows sentence A.
    """

    config: TransformerConfig
    kernel: Kernel = reference
    block: MakeBlock = Block

    def setup(self):
        config = self.config
        self.encoder = EncoderOnly(config, self.kernel, self.block)
        init = dense_init(config)
        self.transform = nn.Dense(config.d_model, dtype=config.dtype, kernel_init=init)
        self.transform_norm = Norm(config)
        self.bias = self.param("bias", nn.initializers.zeros, (config.vocab_size,))
        if config.pooler:
            self.next_sentence = nn.Dense(2, dtype=config.dtype, kernel_init=init)

    def __call__(
        self,
        tokens: jax.Array,
        present: jax.Array | None = None,
        types: jax.Array | None = None,
        at: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> Filling:
        """The logits at the positions `at` [B, P] of `tokens` [B, T], or at all of them.

        `present` [B, T] is False at padding, `types` [B, T] says which sentence a token is of.
        """
        said = self.readout(tokens, present, types, at, noise=noise)
        return said._replace(logits=said.logits.logits())

    def readout(
        self,
        tokens: jax.Array,
        present: jax.Array | None = None,
        types: jax.Array | None = None,
        at: jax.Array | None = None,
        *,
        noise: Noise | None = None,
    ) -> Filling:
        """`__call__` with the logits not multiplied out."""
        hidden, pooled = self.encoder(tokens, present, types, noise=noise)
        if at is not None:
            hidden = jnp.take_along_axis(hidden, at[..., None], axis=1)
        x = ACTIVATIONS[self.config.activation](self.transform(hidden))
        follows = None if pooled is None else self.next_sentence(pooled)
        return Filling(self.encoder.readout(self.transform_norm(x), self.bias), follows)

    def encode(
        self,
        tokens: jax.Array,
        present: jax.Array | None = None,
        types: jax.Array | None = None,
    ) -> Encoding:
        """What the encoder says of `tokens` [B, T], without the heads."""
        return self.encoder(tokens, present, types)


class Classifier(nn.Module):
    """Which of `classes` a text is of: a dense layer on the backbone's summary of it.

    `backbone` is an `EncoderOnly`, a `DecoderOnly`, or any module with a `config` and their
    method `summary`.
    """

    backbone: nn.Module
    classes: int

    @nn.compact
    def __call__(
        self, tokens: jax.Array, present: jax.Array, *, noise: Noise | None = None
    ) -> jax.Array:
        """Logits [B, C] of `tokens` [B, T]; `present` [B, T] is False at padding, at the end."""
        config = self.backbone.config
        x = self.backbone.summary(tokens, present, noise=noise)
        x = Dropout(noise, "/".join((*self.path, "summary")), config.dropout_rate)(x)
        return nn.Dense(
            self.classes, dtype=config.dtype, kernel_init=dense_init(config), name="head"
        )(x)
