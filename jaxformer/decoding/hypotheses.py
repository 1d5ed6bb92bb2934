"""What search and sampling share: a step, and continuations that grow a token at a time."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]
"""step(tokens [B, W], cache) -> (logits [B, W, V], cache), W hypotheses a sentence."""


class Hypotheses(NamedTuple):
    """W continuations of each of B sentences, best first.

    `tokens` [B, W, L]: up to and including the end token, then zeros. `scores` [B, W]: the sum
    of `log_probs` [B, W, L] (nats) under the length penalty, -inf where there is no hypothesis.
    """

    tokens: jax.Array
    scores: jax.Array
    log_probs: jax.Array


def empty(batch: int, width: int, length: int) -> Hypotheses:
    return Hypotheses(
        jnp.zeros((batch, width, length), jnp.int32),
        jnp.full((batch, width), -jnp.inf, jnp.float32),
        jnp.zeros((batch, width, length), jnp.float32),
    )


def append(
    hypotheses: Hypotheses, tokens: jax.Array, added: jax.Array, index: jax.Array
) -> Hypotheses:
    """`hypotheses` with `tokens` [B, W] of log-probability `added` [B, W] at `index`."""
    return Hypotheses(
        hypotheses.tokens.at[:, :, index].set(tokens),
        hypotheses.scores + added,
        hypotheses.log_probs.at[:, :, index].set(added),
    )


def take(hypotheses: Hypotheses, chosen: jax.Array) -> Hypotheses:
    """Hypothesis `chosen[b, w]` of each sentence b, as [B, W', ...]."""
    return Hypotheses(
        jnp.take_along_axis(hypotheses.tokens, chosen[..., None], axis=1),
        jnp.take_along_axis(hypotheses.scores, chosen, axis=1),
        jnp.take_along_axis(hypotheses.log_probs, chosen[..., None], axis=1),
    )


def check_sizes(first: jax.Array, limits: jax.Array, width: int, length: int) -> None:
    if first.ndim != 1 or limits.shape != first.shape:
        raise ValueError(
            f"first has shape {first.shape} and limits {limits.shape}, but both must be [B]: give "
            "one token and one limit a sentence"
        )
    if width < 1 or length < 1:
        raise ValueError(f"width={width} and length={length}, but both must be at least 1")


def are_among(tokens: jax.Array, ids: int | Sequence[int]) -> jax.Array:
    """Which of `tokens` are one of `ids`, or the one id; bool of the shape of `tokens`."""
    return jnp.isin(tokens, np.asarray(ids, np.int32))


def check_logits(logits: jax.Array, tokens: jax.Array, end: int | Sequence[int] = 0) -> None:
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape:
        raise ValueError(
            f"the step made logits of shape {logits.shape} from tokens [B, W] of shape "
            f"{tokens.shape}: it must make [B, W, V]"
        )
    if not all(0 <= one < logits.shape[-1] for one in np.ravel(end)):
        raise ValueError(
            f"end={end} is not among the {logits.shape[-1]} tokens: no hypothesis could end"
        )
