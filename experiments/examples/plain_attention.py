"""Uses attention as a function of arrays: `python -m experiments.examples.plain_attention`.

No module and no state. The derivative of the function shows which token depends on which.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness import cli
from jaxformer.config import check_at_least
from jaxformer.ops.attention import reference
from jaxformer.ops.masks import AttentionMask


def self_attention(weights: dict[str, jax.Array], x: jax.Array, mask: AttentionMask) -> jax.Array:
    """Returns self-attention [B, T, N, H] of `x` [B, T, D].

    `weights`: "query", "key" and "value", [D, N, H] each.
    """
    parts = (jnp.einsum("BTD,DNH->BTNH", x, weights[name]) for name in ("query", "key", "value"))
    query, key, value = parts
    return reference(query, key, value, mask, scale=query.shape[-1] ** -0.5)


def random_weights(rng: jax.Array, d_model: int, heads: int, size: int) -> dict[str, jax.Array]:
    """Returns random weights for `self_attention`."""
    rngs = zip(("query", "key", "value"), jax.random.split(rng, 3), strict=True)
    return {name: jax.random.normal(rng, (d_model, heads, size)) for name, rng in rngs}


def dependencies(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> np.ndarray:
    """Returns [T, T] bool: whether the result of `function` at t depends on token s of `x` [T, D].

    It is computed from the derivative of `function`, not from its mask.
    """
    jacobian = jax.jacobian(function)(x)  # [T, ..., T, D]
    others = tuple(i for i in range(jacobian.ndim) if i not in (0, jacobian.ndim - 2))
    return np.asarray(jnp.any(jacobian != 0, axis=others))


@dataclass(frozen=True)
class AttentionOptions:
    """The sizes of the example."""

    length: int = 5
    """Number of tokens."""
    d_model: int = 8
    """Size of a token's vector."""

    def __post_init__(self):
        check_at_least(self, 3, "length")
        check_at_least(self, 1, "d_model")


def main(options: AttentionOptions) -> None:
    """Prints under four masks which token depends on which, one row per token."""
    of_weights, of_tokens = jax.random.split(jax.random.key(0))
    weights = random_weights(of_weights, options.d_model, heads=2, size=3)
    x = jax.random.normal(of_tokens, (options.length, options.d_model))
    padding_mask = jnp.arange(options.length)[None] < options.length - 1
    masks = {
        "all": AttentionMask(),
        "causal": AttentionMask(causal=True),
        "causal, a window of 2": AttentionMask(causal=True, window=2),
        "the last token is padding": AttentionMask(padding_mask=padding_mask),
    }
    for name, mask in masks.items():
        print(name)

        def attend(x: jax.Array, mask: AttentionMask = mask) -> jax.Array:
            return self_attention(weights, x[None], mask)[0]

        for row in dependencies(attend, x):
            print("  ", " ".join(".x"[int(seen)] for seen in row))


if __name__ == "__main__":
    cli.start(main, {"default": AttentionOptions()}, __doc__)
