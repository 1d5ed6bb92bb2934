"""A compiled function that explains a lack of memory."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

_SIGNS = ("RESOURCE_EXHAUSTED", "out of memory", "YNNPACK operation failed")
"""XLA's messages: on every platform, on some platforms, and for a large product on a CPU."""


class CompiledStep:
    """A function compiled for the devices of a mesh, once for each combination of argument shapes.

    >>> from jaxformer.distributed import CompiledStep, make_mesh
    >>> double = CompiledStep(lambda x: 2 * x, jax.jit, make_mesh("data=1", jax.devices()[:1]))
    >>> double(jnp.ones(3))
    Array([2., 2., 2.], dtype=float32)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        jit: Callable[[Callable[..., Any]], Any],
        mesh: Mesh,
    ) -> None:
        """`jit` compiles for the devices of `mesh`."""
        self._mesh = mesh
        self._compiled = jit(function)

    def __call__(self, *args: Any) -> Any:
        """The result of the function, which may still be computed.

        When a device runs out of memory, a note on JAX's error says how much is held and needed.
        """
        with jax.set_mesh(self._mesh):  # overrides a mesh that the caller has set
            try:
                return self._compiled(*args)
            except jax.errors.JaxRuntimeError as error:
                if is_out_of_memory(error):
                    error.add_note(describe_memory(self, args))
                raise

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program for arguments of these shapes, before compilation."""
        with jax.set_mesh(self._mesh):
            return self._compiled.lower(*args)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` comes from JAX and says that memory was short."""
    message = str(error).lower()
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return is_of_jax and any(sign.lower() in message for sign in _SIGNS)


def describe_memory(program: CompiledStep, args: tuple[Any, ...]) -> str:
    """A sentence with the bytes that a device holds of `args` and needs for intermediate values.

    A `TrainState` is listed by its parts; any other argument is the batch. Donated arrays count
    too. The intermediate values are left out if the program cannot be compiled once more.
    """
    shapes = jax.tree.map(_shape, args)
    parts = ", ".join(f"{name} {size:,} bytes" for name, size in _parts(shapes) if size)
    try:
        memory: Any = program.lower(*shapes).compile().memory_analysis()
        intermediate = memory.temp_size_in_bytes
    except (jax.errors.JaxRuntimeError, AttributeError, ValueError, TypeError):
        return f"a device holds {parts}"
    return f"a device holds {parts}, and intermediate values need {intermediate:,} bytes"


def _parts(args: tuple[Any, ...]) -> Iterator[tuple[str, int]]:
    """The name and the bytes of each part of `args`."""
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
