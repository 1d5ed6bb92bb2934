"""A public module in a Flax NNX model of one's own: `python -m experiments.research.inside_nnx`.

The model of `inside_linen`, with NNX's own layers around the same stack.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments import commands
from experiments.research import series
from experiments.research.inside_linen import SeriesOptions
from experiments.research.series import SeriesBatch
from jaxformer.blocks import Stack
from jaxformer.config import TransformerConfig
from jaxformer.losses import cross_entropy
from jaxformer.masks import Mask


class SeriesModel(nnx.Module):
    """Two logits [B, 2] for each series [B, T, 1]; it holds its weights, as NNX models do."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.enter = nnx.Linear(1, config.d_model, rngs=rngs)
        stack = nnx.bridge.ToNNX(Stack(config, config.num_encoder_layers), rngs=rngs)
        self.encoder = nnx.bridge.lazy_init(stack, jnp.zeros((1, 2, config.d_model)), Mask())
        self.classes = nnx.Linear(config.d_model, 2, rngs=rngs)

    def __call__(self, values: jax.Array) -> jax.Array:
        x, _ = self.encoder(self.enter(values), Mask())
        return self.classes(x.mean(axis=1))


@nnx.jit
def update(model: SeriesModel, optimizer: nnx.Optimizer, batch: SeriesBatch) -> jax.Array:
    """One step, in place; returned is the loss before it, in nats a series."""

    def loss(model):
        valid = jnp.ones(batch.label.shape, bool)
        total, count = cross_entropy(model(batch.series), batch.label, valid)
        return total / count

    value, gradient = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradient)
    return value


def main(options: SeriesOptions) -> None:
    """Trains, and prints how often it is right on series it has not seen."""
    held_out = series.draw(0, rows=500)
    model = SeriesModel(series.SIZES, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(options.learning_rate), wrt=nnx.Param)
    for number in range(1, options.steps + 1):
        loss = update(model, optimizer, series.draw(number))
        if number in (1, options.steps):
            print(f"step {number}: loss {loss:.3f}")
    logits = nnx.jit(lambda model: model(held_out.series))(model)
    print(f"right on new series: {series.share_right(logits, held_out):.1%}")


if __name__ == "__main__":
    options = {"default": SeriesOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
