"""Equal modules that JAX traces and lowers once for all, so that a program is built faster."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from flax import linen as nn


def traced_once(modules: Sequence[nn.Module], method: str) -> list[Callable[..., Any]]:
    """`method` of each of `modules`, traced once if they differ only in their number `layer`.

    The plain twin is `[getattr(module, method) for module in modules]`, which is also what modules
    get that draw random numbers or record something.
    """
    methods = [getattr(module, method) for module in modules]
    scope: Any = modules[0].scope
    if scope.rngs or scope.mutable:
        return methods
    unbound = [module.clone(parent=None, name=None, layer=None) for module in modules]
    first = unbound[0]
    if any(module != first for module in unbound):
        return methods
    apply = jax.jit(
        lambda variables, *args, **options: first.apply(variables, *args, method=method, **options)
    )
    return [partial(apply, module.variables) for module in modules]
