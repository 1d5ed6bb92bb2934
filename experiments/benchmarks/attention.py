"""Attention by each kernel and by PyTorch: `python -m experiments.benchmarks.attention`.

Forward and backward pass, causal, float32, at growing lengths; each in a process of its own, in
turn. Prints a table for each length and writes runs/benchmarks.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments import commands
from experiments.benchmarks import pytorch, report
from experiments.benchmarks.alternate import Summary
from experiments.benchmarks.children import Make, Subject, compare
from experiments.benchmarks.environment import environment
from jaxformer.config import ConfigError, check_least
from jaxformer.kernels import KERNELS


@dataclass(frozen=True)
class Shape:
    """B rows of T = `length` queries and keys, N = `heads` of H = `head_dim` numbers."""

    rows: int = 1
    heads: int = 4
    head_dim: int = 64
    length: int = 1_024

    def __post_init__(self):
        check_least(self, 1, "rows", "heads", "head_dim", "length")

    def arrays(self) -> list[np.ndarray]:
        """Random queries, keys and values [B, T, N, H]."""
        rng = np.random.default_rng(0)
        size = self.rows, self.length, self.heads, self.head_dim
        return [rng.standard_normal(size, np.float32) for _ in range(3)]


@dataclass(frozen=True)
class AttentionOptions:
    """Which `kernels` at which `lengths`, and how long: `rounds` of `steps` each, after `warm_up`.

    The other numbers are those of `shape`, its length aside.
    """

    name: str = "attention"
    kernels: tuple[str, ...] = ("reference", "blockwise", "xla")
    lengths: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    rows: int = 1
    heads: int = 4
    head_dim: int = 64
    rounds: int = 5
    steps: int = 2
    warm_up: int = 1
    runs: str = "runs"

    def __post_init__(self):
        check_least(self, 1, "rounds", "steps", "warm_up")
        unknown = [name for name in self.kernels if name not in KERNELS]
        if unknown:
            known = ", ".join(KERNELS)
            raise ConfigError(f"kernels={self.kernels} has {unknown[0]!r}: choose among {known}")
        if not self.lengths:
            raise ConfigError("lengths=() measures nothing: give at least one")
        self.shapes()

    def shapes(self) -> list[Shape]:
        """One for each of `lengths`."""
        shape = Shape(rows=self.rows, heads=self.heads, head_dim=self.head_dim)
        return [replace(shape, length=length) for length in self.lengths]


PEER = "PyTorch SDPA"


def temporary(summary: Summary, facts: Mapping[str, Any]) -> str:
    """The intermediate results of XLA's program, in MB."""
    size = facts.get("temporary_bytes")
    return "-" if size is None else f"{size / 1e6:.1f}"


def main(options: AttentionOptions) -> None:
    """Measures, prints the tables and writes the file."""
    where = environment()
    found = {}
    for shape in options.shapes():
        found[f"T = S = {shape.length:,}"] = compare(
            subjects(options, shape),
            peers=(PEER,),
            rounds=options.rounds,
            count=options.steps,
            warm_up=options.warm_up,
        )
    report.publish(options, where, found, report.TIMES | {"temporary, MB": temporary})


def subjects(options: AttentionOptions, shape: Shape) -> dict[str, Make]:
    """What makes each of those that are measured, in a process of its own."""
    return {name: partial(kernel, name, shape) for name in options.kernels} | {
        PEER: partial(scaled_dot_product, shape)
    }


def kernel(name: str, shape: Shape) -> Subject:
    """Our kernel called `name`; `ConfigError` from it if it cannot do this here."""
    import jax
    import jax.numpy as jnp

    from jaxformer import runtime
    from jaxformer.masks import Mask

    tuning = runtime.tune()
    q, k, v = map(jnp.asarray, shape.arrays())

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = KERNELS[name](q, k, v, Mask(causal=True), scale=shape.head_dim**-0.5)
        return jnp.square(out).sum()

    differentiate = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=tuning.options)
    compiled = differentiate.lower(q, k, v).compile()
    facts = {
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "device": jax.devices()[0].device_kind,
        "tuned": str(tuning),
    }
    return Subject(lambda: jax.block_until_ready(compiled(q, k, v)), facts)


def scaled_dot_product(shape: Shape) -> Subject:
    """PyTorch's attention, by the backend that it chooses itself."""
    torch = pytorch.load()
    tensors = [torch.tensor(x.swapaxes(1, 2).copy(), requires_grad=True) for x in shape.arrays()]

    def run() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        return torch.autograd.grad(out.square().sum(), tensors)

    return Subject(run, {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    options = {"default": AttentionOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
