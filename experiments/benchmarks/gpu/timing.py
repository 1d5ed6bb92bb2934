"""Timing of work that a device runs asynchronously, and the rate of matrix products."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_ROUND_SECONDS = 0.2  # long enough to make waiting for the device negligible
_MIN_ROUNDS = 3


class Timing(NamedTuple):
    """Seconds of a repetition, over `rounds` of `count` repetitions each."""

    median: float
    least: float
    rounds: int
    count: int  # type: ignore[assignment]  # hides `tuple.count`

    def facts(self) -> dict[str, Any]:
        """Returns the times in ms, as they are written to the file."""
        times = {"ms": self.median * 1e3, "least_ms": self.least * 1e3}
        return times | {"rounds": self.rounds, "repetitions": self.count}


def measure(
    start: Callable[[], Any],
    wait: Callable[[Any], object],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Measures `start()`, which may return before its work is done; `wait` waits for its result.

    `start` runs twice unmeasured, then once to choose the number of repetitions in a round, then
    for about `seconds` and at least 3 rounds.
    """

    def seconds_of(count: int) -> float:
        begin = clock()
        for _ in range(count):
            last = start()
        wait(last)
        return (clock() - begin) / count

    seconds_of(2)
    once = max(seconds_of(1), 1e-9)
    count = max(1, math.ceil(_ROUND_SECONDS / once))
    rounds = max(_MIN_ROUNDS, int(seconds / (once * count)))
    times = [seconds_of(count) for _ in range(rounds)]
    return Timing(statistics.median(times), min(times), rounds, count)


def matrix_rate(size: int, seconds: float) -> Iterator[tuple[str, Any]]:
    """Yields the TFLOP/s of the product of two random matrices [`size`, `size`].

    "float32_teraflops" is at JAX's default precision, TensorFloat-32 on NVIDIA GPUs since Ampere.
    """
    import jax

    yield "device", jax.devices()[0].device_kind
    yield "size", size
    for dtype in ("bfloat16", "float32"):
        found = _product(size, dtype, seconds)
        yield f"{dtype}_ms", found.median * 1e3
        yield f"{dtype}_teraflops", 2 * size**3 / found.median / 1e12


def _product(size: int, dtype: str, seconds: float) -> Timing:
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    with jax.default_matmul_precision("default"):
        multiply = jax.jit(jnp.matmul).lower(a, b).compile()
    return measure(lambda: multiply(a, b), jax.block_until_ready, seconds=seconds)
