"""Four steps to attention, as small functions: `python -m experiments.embeddings.ladder`.

Each rung is a case of the next one. All are causal: vector i of the result is made of those up to
i of `x` [T, D].
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from experiments import commands
from jaxformer.config import check_least


def causal_average(x: jax.Array) -> jax.Array:
    """a_i = (x_1 + ... + x_i) / i, [T, D]: every vector so far counts alike."""
    return jnp.cumsum(x, axis=0) / jnp.arange(1, len(x) + 1)[:, None]


def dot_product_attention(x: jax.Array, compared: jax.Array) -> jax.Array:
    """a_i = sum_j softmax_j(c_i . c_j) x_j, [T, D], with j up to i.

    `compared` c [T, H] says how near two tokens are; the average is the case of c = 0, and
    self-attention without weights that of c = x.
    """
    return scaled_attention(x, compared, 1.0)


def scaled_attention(x: jax.Array, compared: jax.Array, scale: float) -> jax.Array:
    """a_i = sum_j softmax_j(scale c_i . c_j) x_j, [T, D].

    Products of vectors of H independent numbers have a deviation of sqrt(H), so a `scale` of
    1/sqrt(H) keeps the softmax from choosing one token alone (Vaswani et al. 2017, 3.2.1).
    """
    return _attend(compared, compared, x, scale)


def projected_attention(
    x: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """a_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j, [T, Hv] (Vaswani et al. 2017, equation 1).

    q = x `query`, k = x `key` with matrices [D, H], v = x `value` with [D, Hv]. Scaled attention
    of c = x is the case in which all three are the unit matrix.
    """
    return _attend(x @ query, x @ key, x @ value, query.shape[1] ** -0.5)


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, scale: float) -> jax.Array:
    scores = query @ key.T * scale
    past = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(past, scores, -jnp.inf), axis=-1) @ value


@dataclass(frozen=True)
class LadderOptions:
    """How many tokens, and of how many numbers each."""

    length: int = 6
    d_model: int = 64
    seed: int = 0

    def __post_init__(self):
        check_least(self, 1, "length", "d_model")


def main(options: LadderOptions) -> None:
    """Prints, for each rung, how much of the last token's result is that token itself."""
    rng = jax.random.key(options.seed)
    x = jax.random.normal(rng, (options.length, options.d_model))
    matrices = jax.random.normal(rng, (3, options.d_model, options.d_model))
    query, key, _ = matrices * options.d_model**-0.5
    # One-hot values: what comes out are the weights.
    tokens = jnp.eye(options.length)
    root = options.d_model**-0.5
    rungs = {
        "uniform causal average": causal_average(tokens),
        "dot product": dot_product_attention(tokens, x),
        "scaled dot product": scaled_attention(tokens, x, root),
        "with Q and K of their own": _attend(x @ query, x @ key, tokens, root),
    }
    print(f"weights of the last of {options.length} tokens, of {options.d_model} random numbers")
    for name, weights in rungs.items():
        print(f"{name:26}", " ".join(f"{weight:.3f}" for weight in weights[-1]))


if __name__ == "__main__":
    options = {"default": LadderOptions()}
    sys.exit(commands.run(lambda: main(commands.parse(options, description=__doc__))))
