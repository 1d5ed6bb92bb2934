"""Rules that change the logits before a token is picked."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Written(NamedTuple):
    """What a rule knows of a text.

    `counts` [V]: how often it holds each token, prompt included. `tokens` [L]: its continuation,
    of which the first `length` are written.
    """

    counts: jax.Array
    tokens: jax.Array
    length: jax.Array


Rule = Callable[[jax.Array, Written], jax.Array]
"""rule(logits [V], text) -> logits."""


def repetition_penalty(penalty: float, before: Sequence[int] = ()) -> Rule:
    """Makes every token that the text holds less likely (Keskar et al. 2019, section 4.1).

    Its logit is divided by `penalty` if positive, else multiplied, as their code does: above 1 it
    always falls. The text is taken to begin with the tokens `before`. `ValueError` unless
    penalty > 0.
    """
    before = np.asarray(before, np.int32)
    if not penalty > 0:
        raise ValueError(
            f"repetition_penalty {penalty} was given, but it must be positive: 1 is none"
        )

    def rule(logits, text):
        lower = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(text.counts.at[before].add(1) > 0, lower, logits)

    return rule


def forced(token: int, after: int = 0) -> Rule:
    """Certainly `token` where the text holds `after` tokens; `ValueError` if there is none such.

    Its logit becomes 0 and every other's -inf, so that among log-probabilities it costs nothing.
    """

    def rule(logits, text):
        if not 0 <= token < logits.size:
            raise ValueError(f"token {token} was forced, but there are only 0 to {logits.size - 1}")
        only = jnp.full_like(logits, -jnp.inf).at[token].set(0.0)
        return jnp.where(text.counts.sum() == after, only, logits)

    return rule


def renormalized(logits: jax.Array, text: Written) -> jax.Array:
    """A rule: what those before it have left, as log-probabilities that add up to one again."""
    return jax.nn.log_softmax(logits)


def banned(ids: Sequence[int]) -> Rule:
    """Never one of the tokens `ids`; `ValueError` if the vocabulary ends before one of them."""
    ids = np.asarray(ids, np.int32)

    def rule(logits, text):
        if ids.size and not 0 <= ids.min() <= ids.max() < logits.size:
            raise ValueError(
                f"tokens {ids.min()} to {ids.max()} were banned, but there are only 0 to "
                f"{logits.size - 1}"
            )
        return logits.at[ids].set(-jnp.inf)

    return rule


def lasting(least: int, ends: Sequence[int]) -> Rule:
    """None of the tokens `ends` before the continuation has `least` tokens."""
    never = banned(ends)

    def rule(logits, text):
        return jnp.where(text.length < least, never(logits, text), logits)

    return rule


def no_repeats(size: int, before: Sequence[int] = ()) -> Rule:
    """Never a token that ends a run of `size` tokens which the continuation holds already.

    The continuation is taken to begin with the tokens `before` (Paulus et al. 2018, section 2.5,
    with size 3). `ValueError` if size < 1.
    """
    if size < 1:
        raise ValueError(f"no_repeats was given size={size}, but a run has at least 1 token")
    before = np.asarray(before, np.int32)

    def rule(logits, text):
        tokens = jnp.concatenate([before, text.tokens])
        count = len(before) + text.length
        starts = np.arange(max(0, tokens.size - size + 1))
        runs = tokens[starts[:, None] + np.arange(size)]  # [runs, size]
        last = jax.lax.dynamic_slice(tokens, [count - (size - 1)], [min(size - 1, tokens.size)])
        same = (runs[:, : last.size] == last[None]).all(axis=-1) & (starts + size <= count)
        repeated = jnp.zeros(logits.shape, bool).at[runs[:, -1]].max(same)
        return jnp.where(repeated, -jnp.inf, logits)

    return rule
