"""A model as the step function of `jaxformer.decoding`; kept apart for its two users."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.decoding import Step


def make_step_fn(model: nn.Module, params: Any) -> Step:
    """The decoder's step(tokens [B, W], cache) -> (logits [B, W, V], cache).

    It is a `jax.tree_util.Partial`: an input of compiled programs, with `params` as its leaves.
    """
    return jax.tree_util.Partial(_DecodeStep(model), params)


@dataclass(frozen=True)
class _DecodeStep:
    """Equal for equal models, so that JAX finds the program that it has compiled for one."""

    model: nn.Module

    def __call__(
        self, params: Any, tokens: Int[Array, "B W"], cache: Any
    ) -> tuple[Float[Array, "B W V"], Any]:
        variables = {"params": params}
        logits, cache = self.model.apply(variables, tokens[..., None], cache, method="decode_step")
        return logits[:, :, 0], cache
