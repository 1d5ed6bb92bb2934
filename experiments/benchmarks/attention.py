"""Times the attention functions beside PyTorch's: `python -m experiments.benchmarks.attention`.

Causal attention in float32, forward and backward, at several lengths. Prints a table for each
length and writes RUNS/benchmarks/NAME.json.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.benchmarks import report
from experiments.benchmarks.environment import environment, load_torch
from experiments.benchmarks.interleaved_timing import Summary, TimingConfig
from experiments.benchmarks.subprocesses import Make, Subject, compare
from experiments.harness import cli
from jaxformer.config import check_at_least
from jaxformer.errors import ConfigError
from jaxformer.ops.attention import ATTENTION_FNS


@dataclass(frozen=True)
class Shape:
    """The shape [B, T, N, H] of queries, keys and values."""

    rows: int = 1
    heads: int = 4
    head_dim: int = 64
    length: int = 1_024

    def __post_init__(self):
        check_at_least(self, 1, "rows", "heads", "head_dim", "length")

    def arrays(self) -> list[np.ndarray]:
        """Returns random queries, keys and values [B, T, N, H]."""
        rng = np.random.default_rng(0)
        size = self.rows, self.length, self.heads, self.head_dim
        return [rng.standard_normal(size, np.float32) for _ in range(3)]


@dataclass(frozen=True)
class AttentionOptions(TimingConfig):
    """Which attention functions are measured, and at which shapes."""

    name: str = "attention"
    rounds: int = 5
    repetitions: int = 2
    attention_fns: tuple[str, ...] = ("reference", "blockwise", "xla")
    """The attention functions: reference, blockwise, xla, cudnn or tpu_splash."""
    lengths: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    """Numbers of tokens T; each has a table of its own."""
    rows: int = 1
    """Batch size B."""
    heads: int = 4
    """Number of heads N."""
    head_dim: int = 64
    """Size H of a head."""

    def __post_init__(self):
        super().__post_init__()
        unknown = [name for name in self.attention_fns if name not in ATTENTION_FNS]
        if unknown:
            known = ", ".join(ATTENTION_FNS)
            raise ConfigError(f"attention_fns has {unknown[0]!r}: choose among {known}")
        if not self.lengths:
            raise ConfigError("lengths=() measures nothing: give at least one length")
        self.shapes()

    def shapes(self) -> list[Shape]:
        """Returns one shape for each of `lengths`."""
        shape = Shape(rows=self.rows, heads=self.heads, head_dim=self.head_dim)
        return [replace(shape, length=length) for length in self.lengths]


PEER = "PyTorch SDPA"


def temporary(summary: Summary, facts: Mapping[str, Any]) -> str:
    """Returns the temporary memory of XLA's program, in MB."""
    size = facts.get("temporary_bytes")
    return "-" if size is None else f"{size / 1e6:.1f}"


def main(options: AttentionOptions) -> None:
    """Measures, prints the tables and writes the file."""
    where = environment()
    found = {
        f"T = S = {shape.length:,}": compare(subjects(options, shape), options, peers=(PEER,))
        for shape in options.shapes()
    }
    report.publish(options, where, found, report.TIMES | {"temporary, MB": temporary})


def subjects(options: AttentionOptions, shape: Shape) -> dict[str, Make]:
    """Returns what makes each subject."""
    return {name: partial(ours, name, shape) for name in options.attention_fns} | {
        PEER: partial(scaled_dot_product, shape)
    }


def ours(name: str, shape: Shape) -> Subject:
    """Our attention function `name`; it raises `ConfigError` where it does not support this."""
    import jax
    import jax.numpy as jnp

    from jaxformer.ops.masks import AttentionMask
    from jaxformer.runtime import setup

    setup_info = setup.setup_process()
    q, k, v = map(jnp.asarray, shape.arrays())

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = ATTENTION_FNS[name](q, k, v, AttentionMask(causal=True), scale=shape.head_dim**-0.5)
        return jnp.square(out).sum()

    gradient = jax.value_and_grad(loss, (0, 1, 2))
    program = jax.jit(gradient, compiler_options=setup_info.compiler_options).lower(q, k, v)
    compiled = program.compile()
    memory = compiled.memory_analysis()
    facts = {
        "temporary_bytes": memory and memory.temp_size_in_bytes,
        "device": jax.devices()[0].device_kind,
        "tuned": str(setup_info),
    }
    return Subject(lambda: jax.block_until_ready(compiled(q, k, v)), facts)


def scaled_dot_product(shape: Shape) -> Subject:
    """PyTorch's attention, with the backend that PyTorch chooses."""
    torch = load_torch()
    tensors = [torch.tensor(x.swapaxes(1, 2).copy(), requires_grad=True) for x in shape.arrays()]

    def run() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        return torch.autograd.grad(out.square().sum(), tensors)

    return Subject(run, {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    options = {"default": AttentionOptions()}
    sys.exit(cli.run(lambda: main(cli.parse(options, description=__doc__))))
