"""A public module in a Linen model of one's own: `python -m experiments.research.inside_linen`.

The encoder stack reads a time series: no tokens, no embedding, no vocabulary.
"""

import sys
from dataclasses import dataclass

import jax
import optax
from flax import linen as nn

from experiments import commands
from experiments.research import series
from jaxformer.blocks import Stack
from jaxformer.config import TransformerConfig, check_least
from jaxformer.masks import Mask
from jaxformer.training import init_state, make_train_step


class SeriesModel(nn.Module):
    """Two logits [B, 2] for each series [B, T, 1]: numbers in, our encoder, a mean, classes out."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, values: jax.Array) -> jax.Array:
        x = nn.Dense(self.config.d_model, name="enter")(values)
        x, _ = Stack(self.config, self.config.num_encoder_layers, name="encoder")(x, Mask())
        return nn.Dense(2, name="classes")(x.mean(axis=1))


@dataclass(frozen=True)
class SeriesOptions:
    """How long to learn."""

    steps: int = 300
    learning_rate: float = 1e-2

    def __post_init__(self):
        check_least(self, 1, "steps")


def main(options: SeriesOptions) -> None:
    """Trains, and prints how often it is right on series it has not seen."""
    model, held_out = SeriesModel(series.SIZES), series.draw(0, rows=500)
    optimizer = optax.adam(options.learning_rate)
    step = jax.jit(make_train_step(series.loss_of(model), optimizer))
    params = jax.jit(model.init)(jax.random.key(0), held_out.series[:2])["params"]
    state = init_state(params, optimizer, jax.random.key(1))
    for number in range(1, options.steps + 1):
        state, metrics = step(state, series.draw(number))
        if number in (1, options.steps):
            print(f"step {number}: loss {metrics['loss'] / metrics['tokens']:.3f}")
    logits = jax.jit(model.apply)({"params": state.params}, held_out.series)
    print(f"right on new series: {series.share_right(logits, held_out):.1%}")


if __name__ == "__main__":
    options = {"default": SeriesOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
