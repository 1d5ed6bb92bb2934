"""What a program needs of a device's memory, said when there is not enough."""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import jax

_SIGNS = ("RESOURCE_EXHAUSTED", "out of memory", "YNNPACK operation failed")
"""What XLA says of it: on every platform, on some, and of a large product on a CPU."""


class Lowerable(Protocol):
    """What `jax.jit` returns, as far as it is needed here."""

    def lower(self, *args: Any) -> jax.stages.Lowered: ...


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is JAX's and says that memory was short."""
    said = str(error).lower()
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return is_of_jax and any(sign.lower() in said for sign in _SIGNS)


def describe_memory(program: Lowerable, args: tuple[Any, ...]) -> str:
    """What a device holds of `args`, part by part, and what `program` needs besides.

    The parts are those of a `TrainState`; what is no state is the batch. What it needs besides is
    left out where the program cannot be compiled once more to find out. Arrays whose memory was
    given away count as well.
    """
    shapes = jax.tree.map(_shape, args)
    parts = ", ".join(f"{name} {size:,} bytes" for name, size in _parts(shapes) if size)
    try:
        memory = program.lower(*shapes).compile().memory_analysis()
        besides = memory.temp_size_in_bytes
    except (jax.errors.JaxRuntimeError, AttributeError, ValueError, TypeError):
        return f"a device holds {parts}"
    return f"a device holds {parts}, and intermediate values need {besides:,} bytes"


def _parts(args: tuple[Any, ...]) -> Iterator[tuple[str, int]]:
    for arg in args:
        named = {"parameters": "params", "optimizer": "opt_state", "average": "ema"}
        if hasattr(arg, "opt_state"):
            yield from ((name, _held(getattr(arg, part))) for name, part in named.items())
        else:
            yield "batch", _held(arg)


def _held(tree: Any) -> int:
    """Bytes of `tree` on the device that holds most."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
