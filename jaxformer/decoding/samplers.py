"""Samplers: functions that choose a token from logits."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxformer.decoding.generation_config import SamplerConfig
from jaxformer.ops.top_k import top_k as largest_k

Sampler = Callable[[Float[Array, " V"], Key[Array, ""]], Int[Array, ""]]
"""sampler(logits [V], rng) -> the token, int32."""


def greedy(logits: Float[Array, " V"], rng: Key[Array, ""]) -> Int[Array, ""]:
    """The most likely token.

    >>> int(greedy(jnp.array([0.1, 3.0, 2.0]), jax.random.key(0)))
    1
    """
    return jnp.argmax(logits).astype(jnp.int32)


def temperature(value: float) -> Sampler:
    """Draws from softmax(logits / value); `ValueError` unless value > 0.

    >>> logits = jnp.array([0.0, 1.0, 0.0])
    >>> int(temperature(0.01)(logits, jax.random.key(0)))  # its probability is 1 - 2 exp(-100)
    1
    """
    return top_k_top_p(value)


def top_k(k: int, value: float = 1.0) -> Sampler:
    """Draws from the k most likely tokens, at temperature `value`; `ValueError` if k < 1.

    >>> keys = jax.random.split(jax.random.key(0), 50)
    >>> logits = jnp.log(jnp.array([0.5, 0.1, 0.4]))
    >>> jnp.unique(jax.vmap(top_k(2), (None, 0))(logits, keys))
    Array([0, 2], dtype=int32)
    """
    return top_k_top_p(value, k=k)


def top_p(p: float, value: float = 1.0) -> Sampler:
    """Draws from the fewest most likely tokens whose probabilities add up to p.

    Probabilities are those at temperature `value` (Holtzman et al. 2020). Raises `ValueError`
    unless 0 < p <= 1.

    >>> keys = jax.random.split(jax.random.key(0), 50)
    >>> logits = jnp.log(jnp.array([0.5, 0.1, 0.4]))
    >>> jnp.unique(jax.vmap(top_p(0.8), (None, 0))(logits, keys))  # 0.5 + 0.4 is enough
    Array([0, 2], dtype=int32)
    """
    return top_k_top_p(value, p=p)


def min_p(share: float, value: float = 1.0) -> Sampler:
    """Draws from the tokens at least `share` times as likely as the most likely one.

    Probabilities are those at temperature `value` (Nguyen et al. 2024). Raises `ValueError` unless
    0 <= share <= 1.

    >>> keys = jax.random.split(jax.random.key(0), 50)
    >>> logits = jnp.log(jnp.array([0.5, 0.1, 0.4]))
    >>> jnp.unique(jax.vmap(min_p(0.7), (None, 0))(logits, keys))  # from 0.7 x 0.5 = 0.35 on
    Array([0, 2], dtype=int32)
    """
    return top_k_top_p(value, min_p=share)


def top_k_top_p(
    value: float, *, k: int | None = None, p: float = 1.0, min_p: float = 0.0
) -> Sampler:
    """Draws at temperature `value` from the tokens that `top_k`, `top_p` and `min_p` all keep.

    `p` refers to the probabilities among the k most likely tokens. At least one token is kept; of
    equally likely tokens those with the lower ids are. Raises `ValueError` as those three do.

    >>> sampler = top_k_top_p(1.0, k=2, p=0.5)
    >>> logits = jnp.log(jnp.array([0.5, 0.1, 0.4]))
    >>> int(sampler(logits, jax.random.key(0)))  # 0.5 / (0.5 + 0.4) is more than p
    0
    """
    _check_truncation(value, k, p, min_p)
    least = math.log(min_p) if min_p else -math.inf

    def sampler(logits, rng):
        # Relative to the largest logit, so that a very low temperature makes no infinity.
        logits = (logits - logits.max()) / value
        if k is None and p == 1.0:
            kept = jnp.where(logits >= least, logits, -jnp.inf)
            return jax.random.categorical(rng, kept).astype(jnp.int32)
        ranked, tokens = largest_k(logits, min(k or logits.size, logits.size))
        shares = jax.nn.softmax(ranked)
        kept = ranked >= least
        if p < 1.0:
            kept &= jnp.cumsum(shares) - shares < p
        chosen = jax.random.categorical(rng, jnp.where(kept, ranked, -jnp.inf))
        return tokens[chosen].astype(jnp.int32)

    return sampler


def make_sampler(config: SamplerConfig) -> Sampler:
    """The sampler that `config` describes.

    >>> make_sampler(jf.SamplingConfig(temperature=0.0)) is greedy
    True
    """
    if config.temperature == 0:
        return greedy
    return top_k_top_p(
        config.temperature, k=config.top_k or None, p=config.top_p, min_p=config.min_p
    )


def _check_truncation(value: float, k: int | None, p: float, min_p: float) -> None:
    if not value > 0:
        raise ValueError(
            f"temperature {value} was given, but it must be positive: for 0 use greedy"
        )
    if k is not None and k < 1:
        raise ValueError(f"top_k was given k={k}, but needs at least 1")
    if not 0.0 < p <= 1.0:
        raise ValueError(f"top_p was given p={p}, but needs 0 < p <= 1: give 1 for all tokens")
    if not 0.0 <= min_p <= 1.0:
        raise ValueError(f"min_p was given {min_p}, but needs 0 to 1: 0 keeps all")
