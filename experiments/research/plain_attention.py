"""Attention as a plain function: `python -m experiments.research.plain_attention`.

No module, no state: arrays in, arrays out, and every transformation of JAX applies.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from experiments import commands
from jaxformer.config import check_least
from jaxformer.kernels import reference
from jaxformer.masks import Mask


def self_attention(weights: dict[str, jax.Array], x: jax.Array, mask: Mask) -> jax.Array:
    """What each of `x` [B, T, D] gathers from the others that `mask` allows, [B, T, N, H].

    `weights`: "query", "key" and "value", [D, N, H] each.
    """
    parts = (jnp.einsum("BTD,DNH->BTNH", x, weights[name]) for name in ("query", "key", "value"))
    query, key, value = parts
    return reference(query, key, value, mask, scale=query.shape[-1] ** -0.5)


def draw_weights(rng: jax.Array, d_model: int, heads: int, size: int) -> dict[str, jax.Array]:
    """Random weights for `self_attention`."""
    rngs = zip(("query", "key", "value"), jax.random.split(rng, 3), strict=True)
    return {name: jax.random.normal(rng, (d_model, heads, size)) for name, rng in rngs}


def reach(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> np.ndarray:
    """[T, T] bool: whether what `function` gives token t of `x` [T, D] changes with token s.

    Read from the derivative itself, so it holds for any function, whatever its mask says.
    """
    slopes = jax.jacobian(function)(x)  # [T, ..., T, D]
    others = tuple(i for i in range(slopes.ndim) if i not in (0, slopes.ndim - 2))
    return np.asarray(jnp.any(slopes != 0, axis=others))


@dataclass(frozen=True)
class ReachOptions:
    """How many tokens, and of how many numbers each."""

    length: int = 5
    d_model: int = 8

    def __post_init__(self):
        check_least(self, 3, "length")
        check_least(self, 1, "d_model")


def main(options: ReachOptions) -> None:
    """Prints who depends on whom under four masks, a row a token."""
    of_weights, of_tokens = jax.random.split(jax.random.key(0))
    weights = draw_weights(of_weights, options.d_model, heads=2, size=3)
    x = jax.random.normal(of_tokens, (options.length, options.d_model))
    present = jnp.arange(options.length)[None] < options.length - 1
    masks = {
        "all": Mask(),
        "causal": Mask(causal=True),
        "causal, a window of 2": Mask(causal=True, window=2),
        "the last token is padding": Mask(key_valid=present),
    }
    for name, mask in masks.items():
        print(name)
        for row in reach(lambda x, mask=mask: self_attention(weights, x[None], mask)[0], x):
            print("  ", " ".join(".x"[int(seen)] for seen in row))


if __name__ == "__main__":
    options = {"default": ReachOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
