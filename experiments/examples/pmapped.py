"""One training step under jit, pmap and shard_map: `python -m experiments.examples.pmapped`.

A small GPT learns on all devices with each of the three, from the same batches, to the same losses.
`JAX_NUM_CPU_DEVICES=4` before the command simulates four devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

import jaxformer as jf
from experiments.harness import cli

MODEL = jf.DecoderOnly(
    jf.TransformerConfig(
        vocab_size=50, d_model=32, d_ff=64, num_heads=4, num_decoder_layers=2, dropout_rate=0.1
    )
)
OPTIMIZER = jf.make_optimizer(jf.OptimizerConfig(learning_rate=3e-3, warmup_steps=20))
LOSS = jf.causal_loss(MODEL)


@dataclass(frozen=True)
class PmappedOptions:
    """The length of the trainings."""

    steps: int = 100
    """Steps of each training."""
    batch_size: int = 24
    """Rows of a batch, on all devices together."""


def batch_of(number: int, rows: int) -> jf.StreamBatch:
    """Rows that count in steps of 1 to 7, modulo the vocabulary."""
    first, step = np.random.default_rng(number).integers([1, 1], [49, 8], (rows, 2)).T[..., None]
    return jf.StreamBatch.create((first + step * np.arange(17)) % 50, vocab_size=50)


def first_state() -> jf.TrainState:
    """The state before the first step."""
    params = jax.jit(MODEL.init)(jax.random.key(0), jnp.ones((2, 16), int))["params"]
    return jf.init_train_state(params, OPTIMIZER, jax.random.key(1))


def with_jit(rows: int, steps: int) -> list[float]:
    """All rows on one device."""
    step = jax.jit(jf.make_train_step(LOSS, OPTIMIZER))
    return losses(step, first_state(), partial(batch_of, rows=rows), steps)


def with_pmap(rows: int, steps: int) -> list[float]:
    """A copy of the state and [rows / devices] rows on each device; sums are added up by psum."""
    count = jax.local_device_count()
    reduce = partial(jax.lax.psum, axis_name="data")
    step = jax.pmap(jf.make_train_step(LOSS, OPTIMIZER, reduce=reduce), axis_name="data")
    copies = jax.pmap(lambda _, state: state, in_axes=(0, None))(np.arange(count), first_state())

    def divided(number: int) -> jf.StreamBatch:
        return jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch_of(number, rows))

    return losses(step, copies, divided, steps)


def with_shard_map(rows: int, steps: int) -> list[float]:
    """The same as a function of global arrays on a mesh, which `jf.replicated` does too."""
    mesh = Mesh(np.array(jax.local_devices()), ("data",))
    reduce = partial(jax.lax.psum, axis_name="data")
    step = jf.make_train_step(LOSS, OPTIMIZER, reduce=reduce)
    whole, divided = PartitionSpec(), PartitionSpec("data")
    specs: Any = {"in_specs": (whole, divided), "out_specs": (whole, whole)}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    return losses(mapped, first_state(), partial(batch_of, rows=rows), steps)


def losses(
    step: Callable[[Any, Any], Any], state: Any, batches: Callable[[int], Any], steps: int
) -> list[float]:
    """The loss of each step in nats per token."""
    history = []
    for number in range(steps):
        state, metrics = step(state, batches(number))
        history.append(metrics["loss"] / metrics["tokens"])
    return [float(np.ravel(loss)[0]) for loss in history]  # pmap returns one for each device


def main(options: PmappedOptions) -> None:
    """Trains with each, and prints first and last losses."""
    compare(options)


def compare(options: PmappedOptions) -> dict[str, list[float]]:
    """The losses of each, of which the first and the last are printed."""
    count = jax.local_device_count()
    rows = -(-options.batch_size // count) * count
    results = {}
    print(f"{count} x {jax.devices()[0].device_kind}, {rows} rows a step")
    for name, train in (("jit", with_jit), ("pmap", with_pmap), ("shard_map", with_shard_map)):
        results[name] = train(rows, options.steps)
        print(f"{name:9}  loss {results[name][0]:.4f} to {results[name][-1]:.4f}")
    return results


if __name__ == "__main__":
    cli.start(main, {"default": PmappedOptions()}, __doc__)
