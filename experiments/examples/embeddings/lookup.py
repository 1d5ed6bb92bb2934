"""Compares an embedding look-up with a matrix product.

    python -m experiments.examples.embeddings.lookup

Both give the same vectors; the look-up reads rows instead of multiplying by one-hot vectors.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from experiments.harness import cli
from jaxformer.config import check_at_least


def one_hot_product(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows [..., D] of `table` [V, D], as a product with one-hot vectors."""
    return jax.nn.one_hot(ids, len(table), dtype=table.dtype) @ table


def look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns rows [..., D] of `table` [V, D], read by index."""
    return jnp.take(table, ids, axis=0)


@dataclass(frozen=True)
class LookupOptions:
    """The sizes of the example."""

    vocab_size: int = 10_000
    """Rows of the table."""
    d_model: int = 128
    """Columns of the table."""
    tokens: int = 1_024
    """Number of ids to look up."""
    rounds: int = 9
    """Number of timed calls; the median is printed."""

    def __post_init__(self):
        check_at_least(self, 1, "vocab_size", "d_model", "tokens", "rounds")


def main(options: LookupOptions) -> None:
    """Prints the greatest difference of the two functions and the time of each."""
    of_table, of_ids = jax.random.split(jax.random.key(0))
    table = jax.random.normal(of_table, (options.vocab_size, options.d_model))
    ids = jax.random.randint(of_ids, (options.tokens,), 0, options.vocab_size)
    functions = {"product with one-hot vectors": one_hot_product, "table look-up": look_up}
    compiled = {name: jax.jit(function) for name, function in functions.items()}
    a, b = (function(table, ids) for function in compiled.values())
    print(f"greatest difference {float(jnp.abs(a - b).max())}")
    for name, function in compiled.items():
        print(f"{name:29} {_milliseconds(function, (table, ids), options.rounds):8.3f} ms")


def _milliseconds(function: Callable[..., jax.Array], args: tuple, rounds: int) -> float:
    """Returns the median time of a call."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    cli.start(main, {"default": LookupOptions()}, __doc__)
