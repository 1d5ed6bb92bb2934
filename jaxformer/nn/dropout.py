"""Dropout as a module that knows its place in the model."""

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from jaxformer.config.checks import UnitInterval
from jaxformer.nn.checked_module import CheckedModule
from jaxformer.ops.dropout import DropoutMask, DropoutRng, as_dropout_rng


class Dropout(CheckedModule):
    """Dropout whose mask depends on the place in the model and on the example (`DropoutRng`)."""

    rate: UnitInterval
    place: str
    """The name of the place within the parent module."""

    def __call__(
        self, x: Float[Array, "B ... F"], rng: DropoutRng | jax.Array | None
    ) -> Float[Array, "B ... F"]:
        """`x` with a share `rate` of its elements set to zero; `x` itself without a key."""
        dropout = self.at(rng, x)
        return x if dropout is None else dropout(x)

    def at(
        self, rng: DropoutRng | jax.Array | None, x: Float[Array, "B ..."]
    ) -> DropoutMask | None:
        """Dropout of arrays with the rows of `x` as a function; None where nothing is dropped.

        A key alone numbers the rows. Without `rng` Flax's stream "dropout" gives the key, if
        `apply` was given that stream.
        """
        if not self.rate:
            return None
        rng = dropout_rng_of(self, rng, x)
        place = "/".join((*self.path[:-1], self.place))
        return None if rng is None else DropoutMask(rng, place, self.rate)


def dropout_rng_of(
    module: nn.Module, rng: DropoutRng | jax.Array | None, x: Float[Array, "B ..."]
) -> DropoutRng | None:
    """The randomness of the rows of `x` in a call of `module`; None in a call without any.

    Without `rng` Flax's stream "dropout" gives the key, if `apply` was given that stream.
    """
    if rng is None and module.has_rng("dropout") and not module.is_initializing():
        rng = module.make_rng("dropout")
    return as_dropout_rng(rng, x)
