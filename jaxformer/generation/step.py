"""A model as the step that decoding knows."""

from typing import Any

from flax import linen as nn

from jaxformer.decoding import Step


def step_function(model: nn.Module, params: Any) -> Step:
    """`decoding`'s step(tokens [B, W], cache) -> (logits [B, W, V], cache) of a decoder."""

    def step(tokens, cache):
        logits, cache = model.apply({"params": params}, tokens[..., None], cache, method="extend")
        return logits[:, :, 0], cache

    return step
