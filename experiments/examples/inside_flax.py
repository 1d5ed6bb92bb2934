"""Uses the encoder inside custom Flax models: `python -m experiments.examples.inside_flax`.

A Linen and an NNX model classify time series, without tokens, embedding or vocabulary: does the
rise of a noisy series come before its fall? The label depends on two positions together, so the
model needs attention.
"""

import argparse
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from jaxformer.config import NormOptions, positional_encoding
from jaxformer.nn.stack import Encoder


class SeriesBatch(NamedTuple):
    """B series of T numbers, `series` [B, T, 1]; `label` [B] is 1 where the rise comes first."""

    series: np.ndarray
    label: np.ndarray


def random_batch(seed: int, rows: int = 32, length: int = 11) -> SeriesBatch:
    """Noise of standard deviation 0.3 with +2 and -2 added at two positions."""
    rng = np.random.default_rng(seed)
    series = rng.normal(scale=0.3, size=(rows, length, 1)).astype(np.float32)
    positions = rng.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)[:, :2]
    for row, (rise, fall) in enumerate(positions):
        series[row, rise] += 2.0
        series[row, fall] -= 2.0
    return SeriesBatch(series, (positions[:, 0] < positions[:, 1]).astype(np.int32))


class LinenModel(nn.Module):
    """Two logits [B, 2] for each series [B, T, 1]: a linear map, our encoder, a mean."""

    @nn.compact
    def __call__(self, values: jax.Array) -> jax.Array:
        x = nn.Dense(16, name="enter")(values)
        x = x + positional_encoding(length=x.shape[1], d_model=16)[None]
        pre = NormOptions(placement="pre")
        x = Encoder(num_layers=1, num_heads=2, d_ff=24, norm_options=pre, name="encoder")(x)
        return nn.Dense(2, name="classes")(x.mean(axis=1))


class NNXModel(nnx.Module):
    """The same model, with NNX's layers around the same encoder."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(1, 16, rngs=rngs)
        pre = NormOptions(placement="pre")
        encoder = Encoder(num_layers=1, num_heads=2, d_ff=24, norm_options=pre)
        self.encoder = nnx.bridge.ToNNX(encoder, rngs=rngs).lazy_init(jnp.zeros((1, 2, 16)))
        self.classes = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, values: jax.Array) -> jax.Array:
        x = self.enter(values)
        x = x + positional_encoding(length=x.shape[1], d_model=16)[None]
        return self.classes(self.encoder(x).mean(axis=1))


STEPS = 300


def mean_loss(logits: jax.Array, batch: SeriesBatch) -> jax.Array:
    """The loss of `logits` [B, 2] in nats per series."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.label).mean()


def train_linen(held_out: SeriesBatch) -> tuple[list[float], jax.Array]:
    """Trains parameters that go in and come out; returns the losses, and logits of `held_out`."""
    model: Any = LinenModel()
    optimizer = optax.adam(1e-2)
    params = jax.jit(model.init)(jax.random.key(0), held_out.series[:2])
    state = optimizer.init(params)
    losses = []

    @jax.jit
    def update(params, state, batch):
        def loss(params):
            return mean_loss(model.apply(params, batch.series), batch)

        value, gradient = jax.value_and_grad(loss)(params)
        changes, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, changes), state, value

    for number in range(STEPS):
        params, state, value = update(params, state, random_batch(number))
        losses.append(float(value))
    return losses, jax.jit(model.apply)(params, held_out.series)


def train_nnx(held_out: SeriesBatch) -> tuple[list[float], jax.Array]:
    """Trains a model that is changed in place; returns the losses, and logits of `held_out`."""
    model = NNXModel(nnx.Rngs(0))
    losses = []
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer, batch):
        value, gradient = nnx.value_and_grad(lambda m: mean_loss(m(batch.series), batch))(model)
        optimizer.update(model, gradient)
        return value

    for number in range(STEPS):
        losses.append(float(update(model, optimizer, random_batch(number))))
    return losses, nnx.jit(lambda model: model(held_out.series))(model)


def main() -> None:
    """Trains both models, and prints their accuracy on new series."""
    held_out = random_batch(STEPS, rows=500)
    for name, train in (("Linen", train_linen), ("NNX", train_nnx)):
        losses, logits = train(held_out)
        accuracy = np.mean(np.argmax(logits, axis=-1) == held_out.label)
        print(f"{name:5}  loss {losses[0]:.3f} -> {losses[-1]:.3f}, ", end="")
        print(f"accuracy on new series {accuracy:.1%}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help
    main()
