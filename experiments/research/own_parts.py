"""A kernel, a position scheme and a block of one's own: `python -m experiments.research.own_parts`.

Each is a value that a model takes; nothing in the package knows of it.
"""

import sys
from dataclasses import dataclass
from itertools import cycle, islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from experiments import commands
from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block
from jaxformer.cache import KeysValues, Stored, read, write
from jaxformer.config import ConfigError, TransformerConfig, check_least
from jaxformer.data import StreamBatch
from jaxformer.dropout import Dropout, Noise
from jaxformer.kernels import Kernel, reference
from jaxformer.layers import FeedForward, Norm
from jaxformer.losses import causal_loss
from jaxformer.masks import Mask
from jaxformer.models import DecoderOnly
from jaxformer.training import init_state, make_train_step

SIZES = TransformerConfig(
    vocab_size=11,
    d_model=16,
    d_ff=24,
    num_heads=2,
    num_decoder_layers=1,
    norm_placement="pre",
    tied_embeddings="output",
    positions="none",
)


def cosine_kernel(sharpness: float) -> Kernel:
    """Attention by the angle between query and key alone, times `sharpness` (Henry et al. 2020)."""

    def kernel(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Mask,
        *,
        scale: float,
        bias: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        """Takes the place of `scale`, which a model gives, by `sharpness`."""
        facts = {"scale": sharpness, "bias": bias, "dropout": dropout}
        return reference(_unit(q), _unit(k), v, mask, **facts)

    return kernel


class DistanceBlock(Block):
    """A block that learns what each distance is worth, up to `furthest`, a number for each head.

    With `config.positions` "none" it is the model's only knowledge of order.
    """

    furthest: int = 8

    def setup(self):
        super().setup()
        shape = (self.config.num_heads, self.furthest + 1)
        self.worth = self.param("worth", nn.initializers.zeros, shape)

    def __call__(
        self,
        x: jax.Array,
        mask: Mask,
        *,
        positions: jax.Array,
        bias: jax.Array | None = None,
        memory: KeysValues | None = None,
        memory_mask: Mask | None = None,
        past: Stored | None = None,
        noise: Noise | None = None,
    ) -> tuple[jax.Array, Stored | None]:
        """As `Block`, with the worth of distances in the place of `bias`."""
        keys = x.shape[1] if past is None else past.length
        queries = mask.offset + jnp.arange(x.shape[1])
        distance = jnp.abs(queries[:, None] - jnp.arange(keys)[None, :])
        near = jnp.minimum(distance, self.furthest)
        bias = jnp.take(self.worth, near, axis=1)[None]  # [1, N, T, S]
        return super().__call__(
            x,
            mask,
            positions=positions,
            bias=bias,
            memory=memory,
            memory_mask=memory_mask,
            past=past,
            noise=noise,
        )


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + feed_forward(norm(x)): one norm, both at once (Black et al. 2022).

    Raises `ConfigError` for a block with cross-attention.
    """

    config: TransformerConfig
    cross: bool = False
    kernel: Kernel = reference

    def setup(self):
        if self.cross:
            raise ConfigError("a parallel block has no cross-attention: use it in a DecoderOnly")
        self.norm = Norm(self.config)
        self.attention = MultiHeadAttention(self.config, self.kernel)
        self.feed_forward = FeedForward(self.config)

    def __call__(
        self,
        x: jax.Array,
        mask: Mask,
        *,
        positions: jax.Array,
        bias: jax.Array | None = None,
        memory: KeysValues | None = None,
        memory_mask: Mask | None = None,
        past: Stored | None = None,
        noise: Noise | None = None,
    ) -> tuple[jax.Array, Stored | None]:
        """As `Block`; there is no `memory` to read."""
        h = self.norm(x)
        kv = self.attention.keys_values(h, positions)
        if past is not None:
            past = write(past, kv, mask.offset)
            kv = read(past)
        y = self.attention(h, kv, mask, positions=positions, bias=bias, noise=noise)
        y = y + self.feed_forward(h, noise)
        return x + Dropout(noise, "/".join(self.path), self.config.dropout_rate)(y), past


def models() -> dict[str, DecoderOnly]:
    """A language model with each of the three, and one with none of them."""
    return {
        "as it comes": DecoderOnly(SIZES),
        "own kernel": DecoderOnly(SIZES, cosine_kernel(8.0)),
        "own positions": DecoderOnly(SIZES, block=DistanceBlock),
        "own block": DecoderOnly(SIZES, block=ParallelBlock),
    }


def repeating(seed: int, rows: int = 16, length: int = 12) -> StreamBatch:
    """Rows of three random tokens over and over: the token three places back comes next."""
    rng = np.random.default_rng(seed)
    words = rng.permuted(np.tile(np.arange(SIZES.vocab_size), (rows, 1)), axis=1)[:, :3]
    tokens = np.array([list(islice(cycle(row), length + 1)) for row in words], np.int32)
    # The first two labels cannot be known.
    valid = np.broadcast_to(np.arange(length) >= 2, (rows, length))
    return StreamBatch(tokens, valid, np.arange(rows, dtype=np.int32), None, None)


@dataclass(frozen=True)
class PartsOptions:
    """How long each model learns."""

    steps: int = 200
    learning_rate: float = 1e-2

    def __post_init__(self):
        check_least(self, 1, "steps")


def losses(model: DecoderOnly, options: PartsOptions) -> list[float]:
    """Trains `model`; the loss before each update, in nats a token."""
    optimizer = optax.adam(options.learning_rate)
    step = jax.jit(make_train_step(causal_loss(model), optimizer))
    params = jax.jit(model.init)(jax.random.key(0), repeating(0).tokens[:2])["params"]
    state, found = init_state(params, optimizer, jax.random.key(1)), []
    for number in range(options.steps):
        state, metrics = step(state, repeating(number))
        found.append(float(metrics["loss"] / metrics["tokens"]))
    return found


def main(options: PartsOptions) -> None:
    """Prints the first and the last loss of each model."""
    for name, model in models().items():
        found = losses(model, options)
        print(f"{name:14} loss {found[0]:.3f} -> {found[-1]:.3f} nats a token")


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


if __name__ == "__main__":
    options = {"default": PartsOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
