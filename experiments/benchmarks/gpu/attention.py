"""Causal attention at growing lengths, forward and backward, by our kernels and by PyTorch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from experiments.benchmarks.gpu.clock import Pace, pace
from jaxformer import extras


@dataclass(frozen=True)
class Lengths:
    """`tokens` tokens of `heads` heads of `head_dim`, cut into rows of each of `lengths`.

    So that the projections around it would cost the same at each.
    """

    lengths: tuple[int, ...]
    tokens: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    seconds: float = 1.0

    def rows(self, length: int) -> int:
        """How many rows of `length`."""
        return max(self.tokens // length, 1)

    def facts(self, length: int, found: Pace) -> dict[str, Any]:
        """What is told of one length.

        "teraflops" counts two products forward and five backward, of each query with the keys up
        to its own.
        """
        pairs = self.rows(length) * self.heads * length * (length + 1) // 2
        flops = 7 * 2 * pairs * self.head_dim
        return found.facts() | {"rows": self.rows(length), "teraflops": flops / found.median / 1e12}


def kernel(name: str, lengths: Lengths, block: int | None = None) -> Iterator[tuple[str, Any]]:
    """Our kernel `name` at each length, blockwise with blocks of `block` if one is given.

    A length that fails is told with its reason, and the next one is tried.
    """
    import jax

    from jaxformer.kernels import get

    attend = get(name) if block is None else partial(get(name), block=block)
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

    from jaxformer.masks import Mask

    shape = lengths.rows(length), length, lengths.heads, lengths.head_dim
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(rng, shape, lengths.dtype) for rng in keys)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = attend(q, k, v, Mask(causal=True), scale=lengths.head_dim**-0.5)
        return jnp.square(out.astype(jnp.float32)).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, v).compile()
    found = pace(lambda: compiled(q, k, v), jax.block_until_ready, seconds=lengths.seconds)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return lengths.facts(length, found) | {"temporary_bytes": temporary}


def scaled_dot_product(lengths: Lengths) -> Iterator[tuple[str, Any]]:
    """PyTorch's attention at each length, by the backend that it chooses itself."""
    torch = extras.load("torch")
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
        found = pace(partial(_attend, torch, tensors), lambda _: wait(), seconds=lengths.seconds)
        yield str(length), lengths.facts(length, found)


def _attend(torch: ModuleType, tensors: list[Any]) -> Any:
    out = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    return torch.autograd.grad(out.float().square().sum(), tensors)
