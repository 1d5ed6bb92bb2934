"""Times the attention functions next to PyTorch's: `python -m experiments.benchmarks.attention`.

Causal attention, forward and backward, at several lengths, in float32 on a CPU or, with --preset
gpu, in bfloat16 on a GPU. Prints a table for each length and writes RUNS/benchmarks/NAME.json.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.timing import Case, MakeCase, TimingConfig, one_by_one, run_tables
from experiments.benchmarks.torch_peers import load_torch
from experiments.harness import cli
from experiments.harness.training.chips import peak_of
from jaxformer.config import Checked, Count, Natural, import_by_name
from jaxformer.distributed import single
from jaxformer.ops.attention import ATTENTION_FNS, AttentionFn, blockwise
from jaxformer.ops.masks import AttentionMask
from jaxformer.runtime import setup_process


@dataclass(frozen=True)
class Shape(Checked):
    """The shape [B, T, N, H] of queries, keys and values."""

    batch_size: Count = 1
    """Batch size B."""
    seq_len: Count = 1_024
    """Number of tokens T."""
    num_heads: Count = 4
    """Number of heads N."""
    head_dim: Count = 64
    """Size H of a head."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of queries, keys and values."""

    def arrays(self) -> list[np.ndarray]:
        """Random queries, keys and values [B, T, N, H] in float32."""
        rng = np.random.default_rng(0)
        size = self.batch_size, self.seq_len, self.num_heads, self.head_dim
        return [rng.standard_normal(size, np.float32) for _ in range(3)]

    def flops(self) -> int:
        """The FLOPs of causal attention: 2 products forward, 5 backward, of each visible key."""
        pairs = self.batch_size * self.num_heads * self.seq_len * (self.seq_len + 1) // 2
        return 7 * 2 * pairs * self.head_dim


@dataclass(frozen=True)
class AttentionOptions(TimingConfig):
    """The attention functions to measure, and their shapes."""

    name: str = "attention"
    rounds: Count = 5
    repetitions: Count = 1
    attention_fns: tuple[str, ...] = ("reference", "blockwise")
    """reference, blockwise, cudnn, gpu_flash, tpu_flash, or your own as
    package.module:name."""
    seq_lens: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    """Numbers of tokens T; each has a table of its own and replaces `shape.seq_len`."""
    tokens: Natural = 0
    """Tokens of a batch, T of them a sequence; 0: `shape.batch_size` sequences."""
    shape: Shape = Shape()
    """The shape of queries, keys and values."""

    def shapes(self) -> list[Shape]:
        """The shape of each table."""
        shapes = []
        for length in self.seq_lens:
            batch_size = self.shape.batch_size
            if self.tokens:
                batch_size = self.tokens // length
            shapes.append(replace(self.shape, seq_len=length, batch_size=batch_size))
        return shapes


large_blocks = partial(blockwise, block=1_024)
"""`blockwise` with fewer and larger matrix products."""

PRESETS = {
    "default": AttentionOptions(),
    "gpu": one_by_one(
        AttentionOptions(
            name="attention_gpu",
            attention_fns=(
                "cudnn",
                "gpu_flash",
                "reference",
                "blockwise",
                "experiments.benchmarks.attention:large_blocks",
            ),
            seq_lens=tuple(2**n for n in range(10, 16)),
            tokens=2**15,
            shape=Shape(num_heads=16, head_dim=128, dtype="bfloat16"),
        )
    ),
}
PEER = "PyTorch SDPA"
"""The name of PyTorch's `scaled_dot_product_attention` in the tables."""


def main(options: AttentionOptions) -> None:
    """Measures, prints the tables and writes the file."""
    tables: dict[str, dict[str, MakeCase]] = {
        f"T = S = {shape.seq_len:,}": {
            **{name: partial(jax_attention, name, shape) for name in options.attention_fns},
            PEER: partial(torch_attention, shape),
        }
        for shape in options.shapes()
    }
    run_tables(options, tables, (PEER,))


def find_attention(name: str) -> AttentionFn:
    """The attention function called `name`, or package.module:name."""
    return ATTENTION_FNS.get(name) or import_by_name(name, "attention_fns")


def jax_attention(name: str, shape: Shape) -> Case:
    """The loss and the gradient of q, k and v by the attention function `name`.

    Raises `ConfigError` where the function does not support the shape or the device.
    """
    setup = setup_process()
    q, k, v = (jnp.asarray(array, shape.dtype) for array in shape.arrays())
    attend = find_attention(name)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attend(q, k, v, AttentionMask(causal=True), scale=shape.head_dim**-0.5)
        return jnp.square(out.astype(jnp.float32)).sum()

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=setup.compiler_options)
    compiled = gradient.lower(q, k, v).compile()
    memory = compiled.memory_analysis()
    metadata = {
        "temporary_bytes": memory and memory.temp_size_in_bytes,
        "device": jax.devices()[0].device_kind,
        "tuned": str(setup),
        "flops": shape.flops(),
        "peak_flops": peak_of(single(), shape.dtype).total,
    }
    return Case(lambda: compiled(q, k, v), metadata, jax.block_until_ready)


def torch_attention(shape: Shape) -> Case:
    """The gradient of q, k and v by PyTorch's attention, on a GPU if it sees one.

    PyTorch chooses the backend.
    """
    torch = load_torch()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, shape.dtype)
    tensors = [
        torch.tensor(x.swapaxes(1, 2).copy(), dtype=dtype, device=device, requires_grad=True)
        for x in shape.arrays()
    ]

    def run() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        return torch.autograd.grad(out.float().square().sum(), tensors)

    def wait(result: Any) -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    metadata = {"device": device, "threads": torch.get_num_threads(), "flops": shape.flops()}
    return Case(run, metadata, wait)


if __name__ == "__main__":
    cli.start(main, PRESETS, __doc__)
