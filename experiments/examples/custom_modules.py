"""Trains models with custom modules: `python -m experiments.examples.custom_modules`.

An attention function, a position scheme and a block, each given to the model as an argument. With
--mesh fsdp=2,tensor=2 they train on four virtual devices, sharded by a rule of the block's own.
"""

import math
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from experiments.harness import cli
from experiments.harness.planning import start_devices
from jaxformer.config import (
    Checked,
    Count,
    EmbeddingOptions,
    NonNegative,
    NoPositions,
    NormOptions,
    TransformerConfig,
)
from jaxformer.config.positions import PositionScheme, Rotation
from jaxformer.distributed import Strategy, make_mesh, parse_mesh, sharded, single
from jaxformer.errors import ConfigError
from jaxformer.nn.attention import MultiHeadAttention
from jaxformer.nn.cache import LayerCache
from jaxformer.nn.dropout import Dropout
from jaxformer.nn.feed_forward import FeedForward
from jaxformer.nn.models import DecoderOnly
from jaxformer.nn.norm import Norm
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AttentionMask
from jaxformer.text.data import StreamBatch
from jaxformer.training.losses import causal_loss
from jaxformer.training.train_step import TrainState, init_train_state

SIZES = TransformerConfig(
    vocab_size=11,
    d_model=16,
    d_ff=24,
    num_heads=2,
    num_decoder_layers=1,
    norm=NormOptions(placement="pre"),
    embeddings=EmbeddingOptions(tied="output"),
    positions=NoPositions(),
)


def cosine_attention(sharpness: float) -> AttentionFn:
    """Attention by cosine similarity times `sharpness` (Henry et al. 2020)."""

    def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: AttentionMask,
        *,
        scale: float,
        bias: jax.Array | None = None,
        dropout: Any = None,
    ) -> jax.Array:
        """Uses `sharpness` instead of `scale`."""
        q, k = _unit(q), _unit(k)
        return reference(q, k, v, mask, scale=sharpness, bias=bias, dropout=dropout)

    return attend


@dataclass(frozen=True)
class DistanceBias(PositionScheme):
    """A learned attention bias for each head and distance, up to `max_distance`."""

    max_distance: Count = 8

    def params(self, d_model: int, num_heads: int, max_len: int, table_init: Any) -> Any:
        """The bias of each head and distance."""
        return {"table": (nn.initializers.zeros, (num_heads, self.max_distance + 1))}

    def bias(self, distances: jax.Array, num_heads: int, causal: bool, params: Any) -> jax.Array:
        """The bias [_, N, T, S] of the distances between queries and keys, of all texts or each."""
        distance = jnp.minimum(jnp.abs(distances), self.max_distance)
        distance = distance.reshape(-1, *distance.shape[-2:])
        return jnp.swapaxes(jnp.take(params["table"], distance, axis=1), 0, 1)


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + feed_forward(norm(x)), with one norm (Black et al. 2022)."""

    num_heads: int
    d_ff: int
    dropout_rate: float = 0.0
    attention_fn: AttentionFn = reference

    def setup(self):
        self.norm = Norm()
        self.attention = MultiHeadAttention(self.num_heads, attention_fn=self.attention_fn)
        self.feed_forward = FeedForward(self.d_ff)
        self.dropout = Dropout(self.dropout_rate, "output")

    def __call__(
        self,
        x: jax.Array,
        mask: AttentionMask,
        *,
        rotation: Rotation | None = None,
        bias: jax.Array | None = None,
        encoder_kv: None = None,
        encoder_mask: AttentionMask | None = None,
        dropout_rng: DropoutRng | None = None,
    ) -> jax.Array:
        """As `Block`, without cross-attention."""
        h = self.norm(x)
        y = self.attention(h, None, mask, rotation=rotation, bias=bias, dropout_rng=dropout_rng)
        y = y + self.feed_forward(h, dropout_rng)
        return x + self.dropout(y, dropout_rng)

    def decode(
        self,
        x: jax.Array,
        layer_cache: LayerCache,
        mask: AttentionMask,
        *,
        rotation: Rotation | None = None,
        bias: jax.Array | None = None,
        encoder_kv: None = None,
        encoder_mask: AttentionMask | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """As `Block.decode`: the tokens of `x` attend to all in `layer_cache`, and are added."""
        h = self.norm(x)
        keys, values = self.attention.keys_values(h, rotation)
        layer_cache = layer_cache.write(keys, values, mask.offset)
        y = self.attention(h, layer_cache.read(), mask, rotation=rotation, bias=bias)
        return x + y + self.feed_forward(h), layer_cache


def parallel_block(
    *, num_heads: int, d_ff: int, cross: bool, dropout_rate: float, attention_fn: Any, **_: Any
) -> nn.Module:
    """A `ParallelBlock` from the fields of `Block`; `ConfigError` for one with cross-attention."""
    if cross:
        raise ConfigError("a parallel block has no cross-attention: use it in a DecoderOnly")
    return ParallelBlock(num_heads, d_ff, dropout_rate, attention_fn)


CUSTOM_SPECS = {r"feed_forward/up/kernel$": P(None, "tensor")}  # [D, F]
"""Specs by regular expressions of a parameter's path; the first that matches applies. The package's
rules, by the names of axes, also divide this kernel along fsdp."""


def models() -> dict[str, DecoderOnly]:
    """A language model without custom modules, and one with each of the three."""
    return {
        "standard": DecoderOnly(SIZES),
        "custom attention": DecoderOnly(SIZES, cosine_attention(8.0)),
        "custom positions": DecoderOnly(replace(SIZES, positions=DistanceBias())),
        "custom block": DecoderOnly(SIZES, block=parallel_block),
    }


def repeating(seed: int, rows: int = 16, length: int = 12) -> StreamBatch:
    """Rows that repeat three random tokens."""
    rng = np.random.default_rng(seed)
    words = rng.permuted(np.tile(np.arange(SIZES.vocab_size), (rows, 1)), axis=1)[:, :3]
    tokens = np.array([list(islice(cycle(row), length + 1)) for row in words], np.int32)
    # The first two labels cannot be predicted.
    valid = np.broadcast_to(np.arange(length) >= 2, (rows, length))
    return StreamBatch(tokens, valid, np.arange(rows, dtype=np.int32), None, None)


@dataclass(frozen=True)
class CustomModulesOptions(Checked):
    """The training of each model."""

    steps: Count = 200
    """Number of training steps."""
    learning_rate: NonNegative = 1e-2
    """Learning rate of Adam."""
    mesh: str = ""
    """Axes of virtual devices, such as fsdp=2,tensor=2; empty: one device."""

    def __post_init__(self):
        super().__post_init__()
        parse_mesh(self.mesh)


def train(
    model: DecoderOnly, devices: Strategy, options: CustomModulesOptions
) -> tuple[TrainState, list[float]]:
    """Trains `model`; returns the state and the loss before each update, in nats per token."""
    optimizer = optax.adam(options.learning_rate)

    def make_state() -> TrainState:
        params = model.init(jax.random.key(0), repeating(0).tokens[:2])["params"]
        return init_train_state(params, optimizer, jax.random.key(1))

    step = devices.step(causal_loss(model), optimizer)
    state = devices.init(make_state)
    losses = []
    for number in range(options.steps):
        state, metrics = step(state, devices.shard_batch(repeating(number)))
        losses.append(float(metrics["loss"] / metrics["tokens"]))
    return state, losses


def main(options: CustomModulesOptions) -> None:
    """Prints the first and the last loss of each model, and how a kernel is divided."""
    if options.mesh:
        start_devices(math.prod(parse_mesh(options.mesh).values()))
        devices = sharded(make_mesh(options.mesh), paths=CUSTOM_SPECS)
    else:
        devices = single()
    for name, model in models().items():
        state, losses = train(model, devices.for_model(model), options)
        kernel = state.params["decoder"]["blocks_0"]["feed_forward"]["up"]["kernel"]
        part = kernel.addressable_shards[0].data.shape
        print(f"{name:16} loss {losses[0]:.6f} -> {losses[-1]:.6f} nats per token; ", end="")
        print(f"up {list(kernel.shape)} in parts {list(part)}")


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


if __name__ == "__main__":
    cli.start(main, {"default": CustomModulesOptions()}, __doc__)
