"""A compiled function that counts its compilations and explains a lack of memory."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax.sharding import Mesh

from jaxformer.distributed.memory import describe_memory, is_out_of_memory


class CountedJit:
    """A function compiled once for each combination of argument shapes.

    Attributes: `num_compiled`, how many times it was traced and compiled so far.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        jit: Callable[[Callable[..., Any]], Any],
        mesh: Mesh,
        to_global: Callable[[Any], Any],
    ) -> None:
        """`jit` compiles for the devices of `mesh`; `to_global` is applied to what is returned."""

        @wraps(function)
        def counted(*args: Any) -> Any:
            self.num_compiled += 1
            return function(*args)

        self.num_compiled = 0
        self._mesh, self._to_global = mesh, to_global
        self._compiled = jit(counted)

    def __call__(self, *args: Any) -> Any:
        """What the function returns; it may still be computing.

        When a device runs out of memory, a note on JAX's error says how much is held and needed.
        """
        with jax.set_mesh(self._mesh):  # overrides a mesh that the caller has set
            try:
                return self._to_global(self._compiled(*args))
            except jax.errors.JaxRuntimeError as error:
                if is_out_of_memory(error):
                    error.add_note(describe_memory(self, args))
                raise

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """The program for arguments of these shapes, before compilation."""
        with jax.set_mesh(self._mesh):
            return self._compiled.lower(*args)
