"""Causal attention at several lengths, forward and backward: our functions and PyTorch's."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from experiments.benchmarks.gpu.timing import Timing, measure
from jaxformer import optional_dependencies


@dataclass(frozen=True)
class Lengths:
    """A fixed number of `tokens`, divided into rows of each of `lengths`.

    The projections around attention would cost the same at each length.
    """

    lengths: tuple[int, ...]
    tokens: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    seconds: float = 1.0

    def rows(self, length: int) -> int:
        """Returns the number of rows of `length`."""
        return max(self.tokens // length, 1)

    def facts(self, length: int, found: Timing) -> dict[str, Any]:
        """Returns what is reported for one length.

        "teraflops" counts two products forward and five backward, of each query with the keys that
        it may see.
        """
        pairs = self.rows(length) * self.heads * length * (length + 1) // 2
        flops = 7 * 2 * pairs * self.head_dim
        return found.facts() | {"rows": self.rows(length), "teraflops": flops / found.median / 1e12}


def ours(name: str, lengths: Lengths, block: int | None = None) -> Iterator[tuple[str, Any]]:
    """Our attention function `name` at each length; `block` is the block size of blockwise.

    A length that fails is reported with its reason, and the next one is tried.
    """
    import jax

    from jaxformer.ops.attention import ATTENTION_FNS, blockwise

    attend = ATTENTION_FNS[name] if block is None else partial(blockwise, block=block)
    yield "device", jax.devices()[0].device_kind
    yield "block", block
    for length in lengths.lengths:
        try:
            yield str(length), _one(attend, lengths, length)
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            first = next(iter(str(error).splitlines()), "")
            yield str(length), {"failed": f"{type(error).__name__}: {first}"[:300]}


def _one(attend: Any, lengths: Lengths, length: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from jaxformer.ops.masks import AttentionMask

    shape = lengths.rows(length), length, lengths.heads, lengths.head_dim
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(rng, shape, lengths.dtype) for rng in keys)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attend(q, k, v, AttentionMask(causal=True), scale=lengths.head_dim**-0.5)
        return jnp.square(out.astype(jnp.float32)).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
    found = measure(lambda: compiled(q, k, v), jax.block_until_ready, seconds=lengths.seconds)
    memory = compiled.memory_analysis()
    temporary = memory and memory.temp_size_in_bytes
    return lengths.facts(length, found) | {"temporary_bytes": temporary}


def scaled_dot_product(lengths: Lengths) -> Iterator[tuple[str, Any]]:
    """PyTorch's attention at each length, with the backend that PyTorch chooses."""
    torch = optional_dependencies.load("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield "device", torch.cuda.get_device_name() if device == "cuda" else "cpu"
    yield "torch", torch.__version__
    dtype = getattr(torch, lengths.dtype)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for length in lengths.lengths:
        shape = lengths.rows(length), lengths.heads, length, lengths.head_dim
        tensors = [
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        found = measure(partial(_attend, torch, tensors), lambda _: wait(), seconds=lengths.seconds)
        yield str(length), lengths.facts(length, found)


def _attend(torch: ModuleType, tensors: list[Any]) -> Any:
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    return torch.autograd.grad(out.float().square().sum(), tensors)
