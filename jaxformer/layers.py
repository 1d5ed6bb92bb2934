"""The parts of a block besides attention: embeddings, norms, the feed-forward network."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.config import TransformerConfig
from jaxformer.dropout import Dropout, Noise
from jaxformer.losses import Readout
from jaxformer.positions import relative_buckets, sinusoidal_positions
from jaxformer.products import product


def gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution function of x (Hendrycks & Gimpel 2016), by erf.

    To 1e-7 of x; `jax.nn.gelu` is exact to the last digit of far smaller values, by erfc, in twice
    the time.
    """
    return 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5)))


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def dense_init(config: TransformerConfig) -> nn.initializers.Initializer:
    """How projection matrices start: Glorot-uniform, or normal with deviation 0.02."""
    if config.initializer == "xavier":
        return nn.initializers.xavier_uniform()
    return nn.initializers.normal(0.02)


def residual_init(config: TransformerConfig) -> nn.initializers.Initializer:
    """How those start whose product is added to the residual (Radford et al. 2019, 2.3)."""
    if config.initializer == "scaled_normal":
        blocks = config.num_encoder_layers + config.num_decoder_layers
        return nn.initializers.normal(0.02 / math.sqrt(2 * blocks))
    return dense_init(config)


def _table_init(config: TransformerConfig) -> nn.initializers.Initializer:
    deviation = config.d_model**-0.5 if config.initializer == "xavier" else 0.02
    return nn.initializers.normal(deviation)


class Embedding(nn.Module):
    """A `table` [size, D] that maps ids to vectors and, transposed, vectors to logits."""

    size: int
    config: TransformerConfig

    def setup(self):
        shape = (self.size, self.config.d_model)
        self.table = self.param("table", _table_init(self.config), shape)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """The rows [..., D] of `ids`, times sqrt(D) if the config says so (section 3.4)."""
        rows = self.rows(ids).astype(self.config.dtype)
        return rows * math.sqrt(self.config.d_model) if self.config.scale_embeddings else rows

    def rows(self, ids: jax.Array) -> jax.Array:
        """The rows [..., D] of `ids`."""
        return jnp.take(self.table, ids, axis=0)


class Output(nn.Module):
    """Logits of vectors: a matrix of its own or the embedding's transpose, and a bias if asked."""

    config: TransformerConfig

    def setup(self):
        config = self.config
        if not config.ties_output:
            shape = config.d_model, config.vocab_size
            self.kernel = self.param("kernel", dense_init(config), shape)
        if config.output_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (config.vocab_size,))

    def __call__(self, x: jax.Array, embedding: Embedding) -> jax.Array:
        """`x` [..., D] as [..., V]; `embedding` is used where the config ties the two."""
        return self.readout(x, embedding).logits()

    def readout(self, x: jax.Array, embedding: Embedding) -> Readout:
        """What `__call__` multiplies out."""
        matrix = embedding.table.T if self.config.ties_output else self.kernel
        return Readout(x, matrix, self.bias if self.config.output_bias else None)


class AddPositions(nn.Module):
    """Adds to `x` [B, T, D] what the config says of absolute positions, if anything."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, positions: jax.Array, length: int) -> jax.Array:
        """`positions` [T] or [B, T] are below `length`.

        Raises `ValueError` when learned positions end before `length`.
        """
        config = self.config
        if config.positions == "learned":
            if length > config.max_len:
                raise ValueError(
                    f"a sequence of {length} tokens was given, but the learned positions end at "
                    f"max_len={config.max_len}: shorten it"
                )
            shape = (config.max_len, config.d_model)
            table = self.param("table", nn.initializers.normal(0.02), shape)
        elif config.positions == "sinusoidal":
            layout = config.sinusoidal_layout
            table = jnp.asarray(sinusoidal_positions(length, config.d_model, layout))
        else:
            return x
        rows = jnp.take(table, positions, axis=0).reshape(-1, *x.shape[1:])
        return x + rows.astype(x.dtype)


class RelativeBias(nn.Module):
    """A learned number a head for each bucket of distances (Raffel et al. 2020, section 2.1)."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, query: jax.Array, key: jax.Array, causal: bool) -> jax.Array:
        """The bias [1, N, T, S] on attention's logits of positions `query` [T], `key` [S]."""
        config = self.config
        shape = config.relative_buckets, config.num_heads
        table = self.param("table", _table_init(config), shape)
        found = relative_buckets(
            query,
            key,
            buckets=config.relative_buckets,
            max_distance=config.relative_max_distance,
            causal=causal,
        )
        return jnp.moveaxis(jnp.take(table, found, axis=0), -1, 0)[None]


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019) over the last axis."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` [..., D] normalised in float32, scaled and shifted, in the type of `x`."""
        size = x.shape[-1:]
        row = (1,) * (x.ndim - 1) + size
        centered = self.config.norm == "layer"
        y = normalize(x.astype(jnp.float32), self.config.norm_eps, centered)
        y = y * self.param("scale", nn.initializers.ones, size).reshape(row)
        if centered and self.config.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, size).reshape(row)
        return y.astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def normalize(x: jax.Array, eps: float, centered: bool) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) over the last axis; without the mean if not centered."""
    return _normalize(x, eps, centered)[0]


@normalize.defjvp
def _normalize_jvp(eps, centered, primals, tangents):
    # Written out: the automatic derivative makes XLA recompute all later layers' residual sums
    # in each weight gradient on a CPU, quadratic in depth.
    (x,), (dx,) = primals, tangents
    y, inverse = _normalize(x, eps, centered)
    dy = dx - y * jnp.mean(y * dx, axis=-1, keepdims=True)
    if centered:
        dy = dy - jnp.mean(dx, axis=-1, keepdims=True)
    return y, dy * inverse


def _normalize(x: jax.Array, eps: float, centered: bool) -> tuple[jax.Array, jax.Array]:
    if centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse, inverse


class FeedForward(nn.Module):
    """Two linear maps with an activation between, position by position (section 3.3).

    Gated (Shazeer 2020): the activation of one projection multiplies another.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, noise: Noise | None = None) -> jax.Array:
        """[B, T, D] to [B, T, D] through [B, T, F]."""
        config = self.config
        dense = partial(nn.Dense, use_bias=config.use_bias, dtype=config.dtype, dot_general=product)
        init = dense_init(config)
        activation = ACTIVATIONS[config.activation]
        if config.gated:
            hidden = activation(dense(config.d_ff, kernel_init=init, name="gate")(x))
            hidden = hidden * dense(config.d_ff, kernel_init=init, name="up")(x)
        else:
            hidden = activation(dense(config.d_ff, kernel_init=init, name="up")(x))
        site = "/".join((*self.path, "hidden"))
        hidden = Dropout(noise, site, config.activation_dropout_rate)(hidden)
        return dense(config.d_model, kernel_init=residual_init(config), name="down")(hidden)
