"""`tap`: one call in the line whose value can be read and replaced by name (see `inspection`)."""

from flax import linen as nn
from jax import Array
from jaxtyping import Float

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
