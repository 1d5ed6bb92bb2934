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
from jaxformer.config import TransformerConfig
from jaxformer.nn.stack import Stack
from jaxformer.ops.cross_entropy import cross_entropy
from jaxformer.ops.masks import AttentionMask


class SeriesModel(nnx.Module):
    """Two logits [B, 2] for each series [B, T, 1]."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.enter = nnx.Linear(1, config.d_model, rngs=rngs)
        stack = nnx.bridge.ToNNX(Stack(config, config.num_encoder_layers), rngs=rngs)
        self.encoder = nnx.bridge.lazy_init(
            stack, jnp.zeros((1, 2, config.d_model)), AttentionMask()
        )
        self.classes = nnx.Linear(config.d_model, 2, rngs=rngs)

    def __call__(self, values: jax.Array) -> jax.Array:
        x, _ = self.encoder(self.enter(values), AttentionMask())
        return self.classes(x.mean(axis=1))


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
    model = SeriesModel(series.SIZES, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(options.learning_rate), wrt=nnx.Param)
    for number in range(1, options.steps + 1):
        loss = update(model, optimizer, series.random_batch(number))
        if number in (1, options.steps):
            print(f"step {number}: loss {loss:.3f}")
    logits = nnx.jit(lambda model: model(held_out.series))(model)
    print(f"accuracy on new series: {series.accuracy(logits, held_out):.1%}")


if __name__ == "__main__":
    cli.start(main, {"default": SeriesOptions()}, __doc__)
