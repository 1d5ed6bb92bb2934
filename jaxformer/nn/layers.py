"""The parts of a block besides attention: embeddings, norms, the feed-forward network."""

import math
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jaxformer.config import TransformerConfig
from jaxformer.nn.taps import tap
from jaxformer.ops.activations import ACTIVATIONS, normalize, softcap
from jaxformer.ops.dense import dense_dot_general, logits_matmul
from jaxformer.ops.dropout import Dropout, DropoutRng
from jaxformer.ops.masks import AnyArray


def dense_init(config: TransformerConfig) -> nn.initializers.Initializer:
    """The initializer of projections: Glorot-uniform, or normal with deviation 0.02."""
    if config.initializer == "xavier":
        return nn.initializers.xavier_uniform()
    return nn.initializers.normal(0.02)


def residual_init(config: TransformerConfig) -> nn.initializers.Initializer:
    """The initializer of projections into the residual (Radford et al. 2019, section 2.3)."""
    if config.initializer == "scaled_normal":
        blocks = config.num_encoder_layers + config.num_decoder_layers
        return nn.initializers.normal(0.02 / math.sqrt(2 * blocks))
    return dense_init(config)


def table_init(config: TransformerConfig) -> nn.initializers.Initializer:
    """The initializer of tables with a row for each id or bucket."""
    deviation = config.d_model**-0.5 if config.initializer == "xavier" else 0.02
    return nn.initializers.normal(deviation)


def as_row(vector: Float[Array, " D"], ndim: int) -> Float[Array, "*ones D"]:
    """`vector` with `ndim` axes, to be added to vectors [..., D]."""
    return jnp.expand_dims(vector, tuple(range(ndim - 1)))


class Embedding(nn.Module):
    """A `table` [size, D] that maps ids to vectors and, transposed, vectors to logits.

    >>> config = jf.TransformerConfig(vocab_size=5, d_model=4, d_ff=12, num_heads=2)
    >>> table = jnp.arange(20.0).reshape(5, 4)
    >>> vectors = Embedding(5, config).apply({"params": {"table": table}}, jnp.array([[3, 0]]))
    >>> vectors[0, 0]  # row 3, times sqrt(4)
    Array([24., 26., 28., 30.], dtype=float32)
    """

    AXES: ClassVar[Mapping[str, str]] = {"table": "vocab -> embed"}

    size: int
    config: TransformerConfig
    zero_id: int | None = None
    """The id whose vector is zero, whatever its row of the table; None: none."""

    def setup(self) -> None:
        if not (self.is_mutable_collection("params") or self.has_variable("params", "table")):
            raise ValueError(
                f"the variables given have no parameter {'/'.join((*self.path, 'table'))}: call "
                'model.apply({"params": params}, ...) with params = model.init(...)["params"]'
            )
        shape = (self.size, self.config.d_model)
        self.table: Array = self.param("table", table_init(self.config), shape)

    def __call__(self, ids: Int[AnyArray, "*shape"]) -> Float[Array, "*shape D"]:
        """The vectors of `ids`, times sqrt(D) if `config.scale_embeddings` (section 3.4).

        Raises `ValueError` for ids outside the table, unless they are being traced.
        """
        self._check_ids(ids)
        vectors = self.lookup(ids).astype(self.config.dtype)
        if self.zero_id is not None:
            vectors = jnp.where(jnp.equal(ids, self.zero_id)[..., None], 0.0, vectors)
        return vectors * math.sqrt(self.config.d_model) if self.config.scale_embeddings else vectors

    def lookup(self, ids: Int[AnyArray, "*shape"]) -> Float[Array, "*shape D"]:
        """The rows of the table that belong to `ids`."""
        return jnp.take(self.table, ids, axis=0)

    def _check_ids(self, ids: Int[AnyArray, "*shape"]) -> None:
        if isinstance(ids, Tracer) or not getattr(ids, "is_fully_addressable", True):
            return
        ids = np.asarray(ids)
        outside = ids[(ids < 0) | (ids >= self.size)]
        if outside.size:
            raise ValueError(
                f"id {outside[0]} was given to {self.name!r}, which has vocab_size={self.size}: "
                f"give ids from 0 to {self.size - 1}, or a config with a larger vocabulary"
            )


class LMHead(nn.Module):
    """Maps vectors to logits by its own matrix, or by the embedding's transpose if they are tied.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.ones((2, 5), int)
    >>> shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    >>> "output" in shapes, shapes["embedding"]["table"].shape  # tied: no matrix of its own
    (False, (11, 8))
    >>> hidden = jnp.ones((2, 5, 8))
    >>> params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes)
    >>> model.apply({"params": params}, hidden, method="lm_head")[0, 0, 0]  # 8 ones times ones
    Array(8., dtype=float32)
    """

    AXES: ClassVar[Mapping[str, str]] = {"kernel": "embed -> vocab", "bias": "vocab"}

    config: TransformerConfig

    def setup(self) -> None:
        config = self.config
        if not config.ties_output:
            shape = config.d_model, config.vocab_size
            self.kernel: Array = self.param("kernel", dense_init(config), shape)
        if config.output_bias:
            self.bias: Array = self.param("bias", nn.initializers.zeros, (config.vocab_size,))

    def __call__(
        self, hidden: Float[Array, "*shape D"], embedding: Embedding
    ) -> Float[Array, "*shape V"]:
        """The logits of `hidden`; `embedding` is used where the config ties the two."""
        matrix = embedding.table.T if self.config.ties_output else self.kernel
        logits = logits_matmul(hidden, matrix)
        if self.config.output_bias:
            logits = logits + as_row(self.bias, logits.ndim).astype(logits.dtype)
        return softcap(logits, self.config.logits_softcap)


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last axis.

    >>> config = jf.TransformerConfig(vocab_size=5, d_model=2, d_ff=3, num_heads=1)
    >>> out, _ = Norm(config).init_with_output(jax.random.key(0), jnp.array([[3.0, 7.0]]))
    >>> out.round(3)  # mean 5, deviation 2
    Array([[-1.,  1.]], dtype=float32)
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        """`x` normalised in float32, scaled and shifted, in the type of `x`."""
        size = x.shape[-1:]
        centered = self.config.norm == "layer"
        y = normalize(x.astype(jnp.float32), self.config.norm_eps, centered)
        y = y * as_row(self.param("scale", nn.initializers.ones, size), x.ndim)
        if centered and self.config.use_bias:
            y = y + as_row(self.param("bias", nn.initializers.zeros, size), x.ndim)
        return y.astype(x.dtype)


class FeedForward(nn.Module):
    """Two linear maps with an activation between, position by position (section 3.3).

    Gated (Shazeer 2020): the activation of one projection multiplies another. Values to read and
    replace: `hidden` [B, T, F] and `output` [B, T, D].

    >>> config = jf.TransformerConfig(vocab_size=5, d_model=4, d_ff=6, num_heads=1)
    >>> x = jnp.ones((2, 3, 4))
    >>> out, variables = FeedForward(config).init_with_output(jax.random.key(0), x)
    >>> out.shape
    (2, 3, 4)
    >>> sum(leaf.size for leaf in jax.tree.leaves(variables))  # 4 x 6 + 6 and 6 x 4 + 4
    58
    """

    AXES: ClassVar[Mapping[str, str]] = {
        "gate/kernel": "embed -> mlp",
        "gate/bias": "mlp",
        "up/kernel": "embed -> mlp",
        "up/bias": "mlp",
        "down/kernel": "mlp -> embed",
        "down/bias": "embed",
    }

    config: TransformerConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], dropout_rng: DropoutRng | None = None
    ) -> Float[Array, "B T D"]:
        """FFN(x), through a hidden layer [B, T, F]."""
        config = self.config
        dense = partial(
            nn.Dense, use_bias=config.use_bias, dtype=config.dtype, dot_general=dense_dot_general
        )
        init = dense_init(config)
        activation = ACTIVATIONS[config.activation]
        if config.gated:
            hidden = activation(dense(config.d_ff, kernel_init=init, name="gate")(x))
            hidden = hidden * dense(config.d_ff, kernel_init=init, name="up")(x)
        else:
            hidden = activation(dense(config.d_ff, kernel_init=init, name="up")(x))
        name = "/".join((*self.path, "hidden"))
        hidden = tap(self, "hidden", hidden)
        hidden = Dropout(dropout_rng, name, config.activation_dropout_rate)(hidden)
        down = dense(config.d_model, kernel_init=residual_init(config), name="down")
        return tap(self, "output", down(hidden))
