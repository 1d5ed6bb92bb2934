"""The rate of matrix products, by which all others are judged."""

from collections.abc import Iterator
from typing import Any

from experiments.benchmarks.gpu.clock import Pace, pace


def matrix_rate(size: int, seconds: float) -> Iterator[tuple[str, Any]]:
    """TFLOP/s of a product of two square matrices of `size`, of normal random numbers.

    "bfloat16_teraflops"; and "float32_teraflops" at JAX's default precision, which on NVIDIA GPUs
    since Ampere is that of TensorFloat-32.
    """
    import jax

    yield "device", jax.devices()[0].device_kind
    yield "size", size
    for dtype in ("bfloat16", "float32"):
        found = _product(size, dtype, seconds)
        yield f"{dtype}_ms", found.median * 1e3
        yield f"{dtype}_teraflops", 2 * size**3 / found.median / 1e12


def _product(size: int, dtype: str, seconds: float) -> Pace:
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    with jax.default_matmul_precision("default"):
        multiply = jax.jit(jnp.matmul).lower(a, b).compile()
    return pace(lambda: multiply(a, b), jax.block_until_ready, seconds=seconds)
