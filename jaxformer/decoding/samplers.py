"""Samplers: functions that choose a token from logits."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxformer.decoding.settings import SamplerConfig
from jaxformer.ops.top_k import top_k as largest_k

Sampler = Callable[[Float[Array, " V"], Key[Array, ""]], Int[Array, ""]]
"""sampler(logits [V], rng) -> the token, int32."""


def greedy(logits: Float[Array, " V"], rng: Key[Array, ""]) -> Int[Array, ""]:
    """The most likely token."""
    return jnp.argmax(logits).astype(jnp.int32)


def make_sampler(config: SamplerConfig) -> Sampler:
    """The sampler that `config` describes: draws from the tokens that all its limits keep.

    `top_p` refers to the probabilities, at the temperature, among the `top_k` most likely tokens
    (Holtzman et al. 2020), `min_p` to that of the most likely one (Nguyen et al. 2024). At least
    one token is kept; of equally likely tokens those with the lower ids are.

    >>> sampler = make_sampler(jf.SamplingConfig(top_k=2, top_p=0.5))
    >>> logits = jnp.log(jnp.array([0.5, 0.1, 0.4]))
    >>> int(sampler(logits, jax.random.key(0)))  # 0.5 / (0.5 + 0.4) is more than top_p
    0
    """
    if config.temperature == 0:
        return greedy
    least = math.log(config.min_p) if config.min_p else -math.inf

    def sampler(logits, rng):
        # Relative to the largest logit, so that a very low temperature makes no infinity.
        logits = (logits - logits.max()) / config.temperature
        if config.top_k == 0 and config.top_p == 1.0:
            kept = jnp.where(logits >= least, logits, -jnp.inf)
            return jax.random.categorical(rng, kept).astype(jnp.int32)
        ranked, tokens = largest_k(logits, min(config.top_k or logits.size, logits.size))
        kept = ranked >= least
        if config.top_p < 1.0:
            shares = jax.nn.softmax(ranked)
            kept &= jnp.cumsum(shares) - shares < config.top_p
        index = jax.random.categorical(rng, jnp.where(kept, ranked, -jnp.inf))
        return tokens[index].astype(jnp.int32)

    return sampler
