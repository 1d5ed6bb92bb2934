"""Ways of picking a token from logits."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxformer.decoding.largest import largest

Pick = Callable[[jax.Array, jax.Array], jax.Array]
"""pick(logits [V], rng) -> the token, int32."""


def greedy(logits: jax.Array, rng: jax.Array) -> jax.Array:
    """The likeliest token."""
    return jnp.argmax(logits).astype(jnp.int32)


def temperature(value: float) -> Pick:
    """A token drawn from softmax(logits / value); `ValueError` unless value > 0."""
    return truncated(value)


def top_k(k: int, value: float = 1.0) -> Pick:
    """A token drawn from the k likeliest, at temperature `value`; `ValueError` if k < 1."""
    return truncated(value, k=k)


def top_p(p: float, value: float = 1.0) -> Pick:
    """A token drawn from the fewest likeliest whose probability reaches p (Holtzman et al. 2020).

    The probability is that at temperature `value`. `ValueError` unless 0 < p <= 1.
    """
    return truncated(value, p=p)


def min_p(share: float, value: float = 1.0) -> Pick:
    """A token drawn from those at least `share` times as likely as the likeliest.

    At temperature `value` (Nguyen et al. 2024). `ValueError` unless 0 <= share <= 1.
    """
    return truncated(value, min_p=share)


def truncated(value: float, *, k: int | None = None, p: float = 1.0, min_p: float = 0.0) -> Pick:
    """A token drawn at temperature `value` from those that `top_k`, `top_p` and `min_p` all keep.

    `p` is a share of what the k likeliest have together. At least one token is kept, and of
    equally likely ones those with the lower ids. Raises `ValueError` as those three do.
    """
    _check_truncation(value, k, p, min_p)
    least = math.log(min_p) if min_p else -math.inf

    def pick(logits, rng):
        # Against the best, so that no temperature, however low, makes an infinity of it.
        logits = (logits - logits.max()) / value
        if k is None and p == 1.0:
            kept = jnp.where(logits >= least, logits, -jnp.inf)
            return jax.random.categorical(rng, kept).astype(jnp.int32)
        ranked, tokens = largest(logits, min(k or logits.size, logits.size))
        shares = jax.nn.softmax(ranked)
        kept = ranked >= least
        if p < 1.0:
            kept &= jnp.cumsum(shares) - shares < p
        chosen = jax.random.categorical(rng, jnp.where(kept, ranked, -jnp.inf))
        return tokens[chosen].astype(jnp.int32)

    return pick


def _check_truncation(value: float, k: int | None, p: float, min_p: float) -> None:
    if not value > 0:
        raise ValueError(f"temperature {value} was given, but it must be positive: see greedy")
    if k is not None and k < 1:
        raise ValueError(f"top_k was given k={k}, but needs at least 1: give 1 for the likeliest")
    if not 0.0 < p <= 1.0:
        raise ValueError(f"top_p was given p={p}, but needs 0 < p <= 1: give 1 for all tokens")
    if not 0.0 <= min_p <= 1.0:
        raise ValueError(f"min_p was given {min_p}, but needs a share of 0 to 1: 0 keeps all")
