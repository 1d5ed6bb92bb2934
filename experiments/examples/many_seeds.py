"""Trains a small GPT with many seeds in one program: `python -m experiments.examples.many_seeds`.

A training step is a pure function of a state and a batch, so `jax.vmap` makes the step of K states
out of it. Prints the time of a step for each K, and the loss of each seed.
"""

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.examples.custom_modules import SIZES, repeating
from experiments.harness import cli
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError
from jaxformer.nn.models import DecoderOnly
from jaxformer.training.losses import causal_loss
from jaxformer.training.optimizer import OptimizerConfig, make_optimizer
from jaxformer.training.train_step import TrainState, init_train_state, make_train_step


@dataclass(frozen=True)
class ManySeedsOptions:
    """The numbers of seeds, the model and its training."""

    counts: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of seeds K that one program trains, one after the other."""
    steps: int = 100
    """Number of training steps."""
    d_model: int = 32
    """Width of the model."""
    batch_size: int = 8
    """Rows of a batch; all seeds see the same batches."""
    seq_len: int = 16
    """Tokens of a row."""
    learning_rate: float = 3e-3
    """Learning rate of Adam."""

    def __post_init__(self):
        check_at_least(self, 2, "steps")
        check_at_least(self, 1, "batch_size")
        if not self.counts or min(self.counts) < 1:
            raise ConfigError(f"counts={self.counts}, but each number of seeds is at least 1")


class Trained(NamedTuple):
    """The last loss of each seed in nats per token, and the median seconds of a step."""

    losses: Float[np.ndarray, " K"]
    seconds: float


def train(seeds: list[int], options: ManySeedsOptions) -> Trained:
    """Trains a model for each of `seeds`, all in one program."""
    sizes = replace(SIZES, d_model=options.d_model, max_len=options.seq_len)
    model = DecoderOnly(sizes)
    optimizer = make_optimizer(
        OptimizerConfig("constant", learning_rate=options.learning_rate, warmup_steps=0)
    )

    def first_state(key: jax.Array) -> TrainState:
        of_params, of_dropout = jax.random.split(key)
        params = model.init(of_params, jnp.zeros((2, options.seq_len), jnp.int32))["params"]
        return init_train_state(params, optimizer, of_dropout)

    step = make_train_step(causal_loss(model), optimizer)
    all_seeds = jax.jit(jax.vmap(step, in_axes=(0, None)), donate_argnums=0)
    states = jax.jit(jax.vmap(first_state))(jax.vmap(jax.random.key)(jnp.array(seeds)))
    times = []
    for number in range(options.steps):
        batch = repeating(number, options.batch_size, options.seq_len)
        start = time.perf_counter()
        states, metrics = jax.block_until_ready(all_seeds(states, batch))
        times.append(time.perf_counter() - start)
    losses = np.asarray(metrics["loss"] / metrics["tokens"])
    return Trained(losses, float(np.median(times[1:])))  # the first one compiles


def main(options: ManySeedsOptions) -> None:
    """Prints a line for each number of seeds, and the losses of the last one."""
    print(" K      step  per seed  loss: mean      sd")
    for count in options.counts:
        losses, seconds = train(list(range(count)), options)
        deviation = f"{losses.std(ddof=1):.4f}" if count > 1 else "-"
        each = f"{1e3 * seconds:6.1f} ms {1e3 * seconds / count:6.1f} ms"
        print(f"{count:2} {each}  {losses.mean():10.4f}  {deviation:>6}", flush=True)
    print("losses of the last line:", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    cli.start(main, {"default": ManySeedsOptions()}, __doc__)
