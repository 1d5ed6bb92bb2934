"""An embedding is a linear map of one-hot vectors: `python -m experiments.embeddings.lookup`."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from experiments import commands
from jaxformer.config import check_least


def one_hot_product(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows [..., D] of `table` [V, D], as products with V-dimensional one-hot vectors."""
    return jax.nn.one_hot(ids, len(table), dtype=table.dtype) @ table


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """The rows [..., D] of `table` [V, D], read where they stand."""
    return jnp.take(table, ids, axis=0)


@dataclass(frozen=True)
class LookupOptions:
    """How large the table is, and how many ids are looked up."""

    vocab_size: int = 10_000
    d_model: int = 128
    tokens: int = 1_024
    rounds: int = 9

    def __post_init__(self):
        check_least(self, 1, "vocab_size", "d_model", "tokens", "rounds")


def main(options: LookupOptions) -> None:
    """Prints how far the two ways differ, and how long each takes."""
    of_table, of_ids = jax.random.split(jax.random.key(0))
    table = jax.random.normal(of_table, (options.vocab_size, options.d_model))
    ids = jax.random.randint(of_ids, (options.tokens,), 0, options.vocab_size)
    ways = {"product with one-hot vectors": one_hot_product, "table look-up": look_up}
    compiled = {name: jax.jit(way) for name, way in ways.items()}
    a, b = (way(table, ids) for way in compiled.values())
    print(f"greatest difference {float(jnp.abs(a - b).max())}")
    for name, way in compiled.items():
        print(f"{name:29} {_milliseconds(way, (table, ids), options.rounds):8.3f} ms")


def _milliseconds(way: Callable[..., jax.Array], args: tuple, rounds: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(way(*args))
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    options = {"default": LookupOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
