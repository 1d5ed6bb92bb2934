"""Uses the encoder inside a Flax NNX model: `python -m experiments.examples.inside_nnx`.

The model of `inside_linen`, with NNX's layers around the same encoder.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.examples import series
from experiments.examples.inside_linen import SeriesOptions
from experiments.examples.series import SeriesBatch
from experiments.harness import cli
from jaxformer.config import NormOptions, positional_encoding
from jaxformer.nn.blocks import Encoder
from jaxformer.ops.cross_entropy import cross_entropy


class SeriesModel(nnx.Module):
    """Two logits [B, 2] for each series [B, T, 1]."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter = nnx.Linear(1, 16, rngs=rngs)
        pre = NormOptions(placement="pre")
        encoder = Encoder(num_layers=1, num_heads=2, d_ff=24, norm_options=pre)
        self.encoder = nnx.bridge.ToNNX(encoder, rngs=rngs).lazy_init(jnp.zeros((1, 2, 16)))
        self.classes = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, values: jax.Array) -> jax.Array:
        x = self.enter(values)
        x = x + positional_encoding(length=x.shape[1], d_model=16)
        return self.classes(self.encoder(x).mean(axis=1))


@nnx.jit
def update(model: SeriesModel, optimizer: nnx.Optimizer, batch: SeriesBatch) -> jax.Array:
    """Makes one step in place; returns the loss before it, in nats per series."""

    def loss(model):
        valid = jnp.ones(batch.label.shape, bool)
        total, count = cross_entropy(model(batch.series), jnp.asarray(batch.label), valid)
        return total / count

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def main(options: SeriesOptions) -> None:
    """Trains the model, and prints its accuracy on new series."""
    held_out = series.random_batch(0, rows=500)
    model = SeriesModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(options.learning_rate), wrt=nnx.Param)
    for number in range(1, options.steps + 1):
        loss = update(model, optimizer, series.random_batch(number))
        if number in (1, options.steps):
            print(f"step {number}: loss {loss:.3f}")
    logits = nnx.jit(lambda model: model(held_out.series))(model)
    print(f"accuracy on new series: {series.accuracy(logits, held_out):.1%}")


if __name__ == "__main__":
    cli.start(main, {"default": SeriesOptions()}, __doc__)
