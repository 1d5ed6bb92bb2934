"""Uses the encoder inside a custom Linen model: `python -m experiments.examples.inside_linen`.

The model classifies time series, without tokens, embedding or vocabulary.
"""

from dataclasses import dataclass

import jax
import optax
from flax import linen as nn

from experiments.examples import series
from experiments.harness import cli
from jaxformer.config import NormOptions, check_at_least, positional_encoding
from jaxformer.nn.blocks import Encoder
from jaxformer.training.train_step import init_train_state, make_train_step


class SeriesModel(nn.Module):
    """Two logits [B, 2] for each series [B, T, 1]: a linear map, our encoder, a mean."""

    @nn.compact
    def __call__(self, values: jax.Array) -> jax.Array:
        x = nn.Dense(16, name="enter")(values)
        x = x + positional_encoding(length=x.shape[1], d_model=16)
        pre = NormOptions(placement="pre")
        x = Encoder(num_layers=1, num_heads=2, d_ff=24, norm_options=pre, name="encoder")(x)
        return nn.Dense(2, name="classes")(x.mean(axis=1))


@dataclass(frozen=True)
class SeriesOptions:
    """How the model is trained."""

    steps: int = 300
    """Number of training steps."""
    learning_rate: float = 1e-2
    """Learning rate of Adam."""

    def __post_init__(self):
        check_at_least(self, 1, "steps")


def main(options: SeriesOptions) -> None:
    """Trains the model, and prints its accuracy on new series."""
    model, held_out = SeriesModel(), series.random_batch(0, rows=500)
    optimizer = optax.adam(options.learning_rate)
    step = jax.jit(make_train_step(series.loss_of(model), optimizer))
    params = jax.jit(model.init)(jax.random.key(0), held_out.series[:2])["params"]
    state = init_train_state(params, optimizer, jax.random.key(1))
    for number in range(1, options.steps + 1):
        state, metrics = step(state, series.random_batch(number))
        if number in (1, options.steps):
            print(f"step {number}: loss {metrics['loss'] / metrics['tokens']:.3f}")
    logits = jax.jit(model.apply)({"params": state.params}, held_out.series)
    print(f"accuracy on new series: {series.accuracy(logits, held_out):.1%}")


if __name__ == "__main__":
    cli.start(main, {"default": SeriesOptions()}, __doc__)
