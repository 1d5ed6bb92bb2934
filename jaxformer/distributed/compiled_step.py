"""Functions compiled for the devices of a mesh."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh


class CompiledStep:
    """A function compiled for the devices of a mesh, once for each combination of argument shapes.

    `options` go to `jax.jit`.

    >>> from jaxformer.distributed import CompiledStep, make_mesh
    >>> double = CompiledStep(lambda x: 2 * x, make_mesh("data=1", jax.devices()[:1]))
    >>> double(jnp.ones(3))
    Array([2., 2., 2.], dtype=float32)
    """

    loss: Any = None
    """The loss that a training step minimises; None of other functions."""

    def __init__(
        self,
        function: Callable[..., Any],
        mesh: Mesh,
        compiler_options: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self._mesh = mesh
        options["compiler_options"] = dict(compiler_options) or None
        self._compiled = jax.jit(function, **options)

    def __call__(self, *args: Any) -> Any:
        """The result of the function, which may still be computed."""
        with jax.set_mesh(self._mesh):  # overrides a mesh that the caller has set
            return self._compiled(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program for arguments of these shapes, before compilation."""
        with jax.set_mesh(self._mesh):
            return self._compiled.lower(*args)


@contextmanager
def threefry_kernel(use: bool) -> Iterator[None]:
    """Within it, if `use`, programs for a GPU call JAX's kernel for random numbers.

    A program that creates many parameters then compiles in a tenth of the time: otherwise each has
    a kernel of its own.
    """
    option = "jax_threefry_gpu_kernel_lowering"
    before = getattr(jax.config, option)
    jax.config.update(option, use or before)
    try:
        yield
    finally:
        jax.config.update(option, before)
