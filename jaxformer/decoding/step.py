"""The step function of a search or a sampling, and checks of it, of its cache and of its texts."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.ops.masks import AnyArray

Step = Callable[[Int[Array, "B W"], Any], tuple[Float[Array, "B W V"], Any]]
"""step(tokens [B, W], cache) -> (logits [B, W, V], cache), with W hypotheses per sentence."""


def check_batch(first: Int[AnyArray, " B"]) -> None:
    """Raises `ValueError` for a batch of no sentences."""
    if not len(first):
        raise ValueError("the batch is empty: give at least one sentence")


def check_logits(
    logits: Float[Array, "B W V"], tokens: Int[Array, "B W"], eos: Sequence[int]
) -> None:
    """Raises `ValueError` for logits of a wrong shape and for `eos` outside the vocabulary."""
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise ValueError(
            f"the step function returned logits of shape {logits.shape} for tokens of shape "
            f"{tokens.shape}: it must return [B, W, V] for [B, W]"
        )
    if not all(0 <= token < logits.shape[-1] for token in eos):
        raise ValueError(
            f"eos={tuple(eos)}, but the step function's logits are of the tokens 0 to "
            f"{logits.shape[-1] - 1}: give EOS ids among them"
        )


def check_room(cache: Any, count: int) -> None:
    """Raises `ValueError` for a cache that knows its size and has no room for `count` tokens."""
    if hasattr(cache, "check_room"):
        cache.check_room(count)


def check_beams(cache: Any, beam_size: int) -> None:
    """Raises `ValueError` for a cache that knows the number of its beams and has another one."""
    beams = getattr(cache, "num_beams", beam_size)
    if beams != beam_size:
        raise ValueError(
            f"the cache is for num_beams={beams} of a sentence, but beam_size={beam_size}: give "
            f"num_beams={beam_size} to init_cache"
        )


def largest(values: Int[AnyArray, " B"]) -> int:
    """The largest of `values`, at least 0; they may not be traced, but the caller may be."""
    return int(np.asarray(values).max(initial=0))


def is_among(tokens: Int[Array, "*shape"], ids: Sequence[int]) -> Bool[Array, "*shape"]:
    """Whether each token is in `ids`."""
    return jnp.isin(tokens, np.asarray(ids, np.int32))
