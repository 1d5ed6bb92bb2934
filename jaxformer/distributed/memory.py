"""How much memory a program needs, for the error when a device has too little."""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import jax

_SIGNS = ("RESOURCE_EXHAUSTED", "out of memory", "YNNPACK operation failed")
"""XLA's messages: on every platform, on some platforms, and for a large product on a CPU."""


class Lowerable(Protocol):
    """The part of what `jax.jit` returns that is used here."""

    def lower(self, *args: Any) -> jax.stages.Lowered: ...


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` comes from JAX and says that memory was short."""
    said = str(error).lower()
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return is_of_jax and any(sign.lower() in said for sign in _SIGNS)


def describe_memory(program: Lowerable, args: tuple[Any, ...]) -> str:
    """How many bytes a device holds of each part of `args`, and needs for intermediate values.

    The parts are those of a `TrainState`; any other argument is the batch. Donated arrays count
    too. The intermediate values are left out if the program cannot be compiled once more.
    """
    shapes = jax.tree.map(_shape, args)
    parts = ", ".join(f"{name} {size:,} bytes" for name, size in _parts(shapes) if size)
    try:
        memory: Any = program.lower(*shapes).compile().memory_analysis()
        besides = memory.temp_size_in_bytes
    except (jax.errors.JaxRuntimeError, AttributeError, ValueError, TypeError):
        return f"a device holds {parts}"
    return f"a device holds {parts}, and intermediate values need {besides:,} bytes"


def _parts(args: tuple[Any, ...]) -> Iterator[tuple[str, int]]:
    named = {"parameters": "params", "optimizer": "opt_state", "average": "ema"}
    for arg in args:
        if hasattr(arg, "opt_state"):
            yield from ((name, _bytes_held(getattr(arg, part))) for name, part in named.items())
        else:
            yield "batch", _bytes_held(arg)


def _bytes_held(tree: Any) -> int:
    """Bytes of `tree` on the device that holds the most."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
