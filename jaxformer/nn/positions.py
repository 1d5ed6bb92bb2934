"""The parameters of a position scheme."""

from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array

from jaxformer.config.positions import ParamSpecs


class PositionParams(nn.Module):
    """The parameters of a position scheme by name, from its initializers and shapes."""

    AXES: ClassVar[Mapping[str, str]] = {
        "table": "position -> embed",
        "relative_bias": "bucket -> heads",
    }

    @nn.compact
    def __call__(self, specs: ParamSpecs) -> dict[str, Array]:
        """The parameters, float32; `specs` come from `PositionScheme.params`."""
        return {
            name: self.param(name, init, shape, jnp.float32)
            for name, (init, shape) in specs.items()
        }
