"""Growing hypotheses: their tokens, scores and log-probabilities."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Hypotheses(NamedTuple):
    """W continuations of each of B sentences, best first."""

    tokens: Int[Array, "B W L"]
    """Token ids up to and including EOS, then zeros."""
    scores: Float[Array, "B W"]
    """The sum of `log_probs` under the length penalty; -inf where there is no hypothesis."""
    log_probs: Float[Array, "B W L"]
    """The log-probability (nats) of each token, then zeros."""


def empty_hypotheses(batch: int, beam_size: int, size: int) -> Hypotheses:
    """Hypotheses without a token, with space for `size` tokens, whose scores are -inf."""
    return Hypotheses(
        jnp.zeros((batch, beam_size, size), jnp.int32),
        jnp.full((batch, beam_size), -jnp.inf, jnp.float32),
        jnp.zeros((batch, beam_size, size), jnp.float32),
    )


def append_tokens(
    hypotheses: Hypotheses,
    tokens: Int[Array, "B W"],
    log_probs: Float[Array, "B W"],
    index: Int[Array, " B"],
) -> Hypotheses:
    """`hypotheses` with `tokens` at `index`; their log-probabilities are added to the scores."""
    is_place = jnp.arange(hypotheses.tokens.shape[-1])[None, None] == index[:, None, None]
    return Hypotheses(
        jnp.where(is_place, tokens[..., None], hypotheses.tokens),
        hypotheses.scores + log_probs,
        jnp.where(is_place, log_probs[..., None], hypotheses.log_probs),
    )


def gather_beams(hypotheses: Hypotheses, chosen: Int[Array, "B C"]) -> Hypotheses:
    """Hypothesis `chosen[b, c]` of each sentence b."""
    return Hypotheses(
        jnp.take_along_axis(hypotheses.tokens, chosen[..., None], axis=1),
        jnp.take_along_axis(hypotheses.scores, chosen, axis=1),
        jnp.take_along_axis(hypotheses.log_probs, chosen[..., None], axis=1),
    )
