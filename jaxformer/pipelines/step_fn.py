"""A model as the step function that beam search and sampling call."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxformer.decoding import Step


def make_step_fn(model: nn.Module, params: Any) -> Step:
    """The decoder's step(tokens [B, W], cache) -> (logits [B, W, V], cache).

    It is a `jax.tree_util.Partial`: an input of compiled programs, with `params` as its leaves.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model = jf.DecoderOnly(config)
    >>> params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 3), int))["params"]
    >>> step = jf.make_step_fn(model, params)
    >>> cache = model.apply({"params": params}, 2, max_length=5, method="init_cache")
    >>> logits, cache = jax.jit(step)(jnp.array([[1], [1]]), cache)
    >>> logits.shape, int(cache.length)  # [B, W, V]
    ((2, 1, 11), 1)
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
