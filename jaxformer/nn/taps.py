"""Taps: named values inside a model that can be recorded and replaced.

The name of a value is the path of its module and a name within it, such as
`decoder/blocks_2/feed_forward/hidden`. A module class says in `TAPS` which of its methods return
such values; modules themselves know nothing of taps. Replacements reach a model as a collection of
variables, that is, as an argument. `jaxformer.nn.inspection` lists, records and replaces values.
"""

from contextlib import AbstractContextManager
from typing import Any

from flax import linen as nn
from jaxtyping import Array, Float

INTERMEDIATES = "intermediates"
"""The collection in which values are recorded if it is mutable."""
REPLACEMENTS = "replacements"
"""The collection that holds a function for each value to replace."""


def tap(module: nn.Module, name: str, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x`, or what replaces the value `name` of `module`; recorded if asked.

    >>> class Doubled(nn.Module):
    ...     def __call__(self, x):
    ...         return tap(self, "doubled", 2 * x)
    >>> _, values = jf.read_taps(Doubled(), {}, jnp.array([1.0, 3.0]))
    >>> values["doubled"]
    Array([2., 6.], dtype=float32)
    """
    if module.has_variable(REPLACEMENTS, name):
        x = module.get_variable(REPLACEMENTS, name)(x)
    module.sow(INTERMEDIATES, name, x)
    return x


def tapping() -> AbstractContextManager[None]:
    """A context in which the results of the methods that `TAPS` names are taps.

    `TAPS` maps a method to the name of its result, or to the names in a tuple of results (None: no
    tap); "{0}" in a name stands for the first argument of the call.
    """
    return nn.intercept_methods(_tap_results)


def _tap_results(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    result, module = call(*args, **kwargs), context.module
    names = getattr(module, "TAPS", {}).get(context.method_name)
    if names is None:
        return result
    if isinstance(names, str):
        return tap(module, names.format(*args[:1]), result)
    values = [
        x if name is None else tap(module, name, x) for name, x in zip(names, result, strict=True)
    ]
    return type(result)(*values) if hasattr(result, "_fields") else tuple(values)
