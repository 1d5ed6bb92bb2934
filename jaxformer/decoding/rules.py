"""Rules that change the logits before a token is picked."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Rule = Callable[[jax.Array, jax.Array], jax.Array]
"""rule(logits [V], counts [V]) -> logits; how often the text holds each token, prompt included."""


def repetition_penalty(penalty: float) -> Rule:
    """Makes every token that the text holds less likely (Keskar et al. 2019, section 4.1).

    Its logit is divided by `penalty` if positive, else multiplied, as their code does: above 1 it
    always falls. `ValueError` unless penalty > 0.
    """
    if not penalty > 0:
        raise ValueError(
            f"repetition_penalty {penalty} was given, but it must be positive: 1 is none"
        )

    def rule(logits, counts):
        lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(counts > 0, lower, logits)

    return rule


def forced(token: int, after: int = 0) -> Rule:
    """Certainly `token` where the text holds `after` tokens; `ValueError` if there is none such.

    Its logit becomes 0 and every other's -inf, so that among log-probabilities it costs nothing.
    """

    def rule(logits, counts):
        if not 0 <= token < logits.size:
            raise ValueError(f"token {token} was forced, but there are only 0 to {logits.size - 1}")
        only = jnp.full_like(logits, -jnp.inf).at[token].set(0.0)
        return jnp.where(counts.sum() == after, only, logits)

    return rule


def renormalized(logits: jax.Array, counts: jax.Array) -> jax.Array:
    """A rule: what those before it have left, as log-probabilities that add up to one again."""
    return jax.nn.log_softmax(logits)


def banned(ids: Sequence[int]) -> Rule:
    """Never one of the tokens `ids`; `ValueError` if the vocabulary ends before one of them."""
    ids = np.asarray(ids, np.int32)

    def rule(logits, counts):
        if ids.size and not 0 <= ids.min() <= ids.max() < logits.size:
            raise ValueError(
                f"tokens {ids.min()} to {ids.max()} were banned, but there are only 0 to "
                f"{logits.size - 1}"
            )
        return logits.at[ids].set(-jnp.inf)

    return rule
