"""Four steps from an average to attention.

    python -m experiments.examples.embeddings.attention_step_by_step

Each step is a special case of the next one. All are causal: row i of the result depends on rows up
to i of `x` [T, D].
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from experiments.harness import cli
from jaxformer.config import check_at_least


def causal_average(x: jax.Array) -> jax.Array:
    """a_i = (x_1 + ... + x_i) / i, [T, D]: equal weights."""
    return jnp.cumsum(x, axis=0) / jnp.arange(1, len(x) + 1)[:, None]


def dot_product_attention(x: jax.Array, compared: jax.Array) -> jax.Array:
    """a_i = sum_j softmax_j(c_i . c_j) x_j, [T, D], with j up to i.

    `compared` is c [T, H]. With c = 0 it is the average; with c = x it is self-attention without
    projections.
    """
    return scaled_attention(x, compared, 1.0)


def scaled_attention(x: jax.Array, compared: jax.Array, scale: float) -> jax.Array:
    """a_i = sum_j softmax_j(scale c_i . c_j) x_j, [T, D].

    The product of two random vectors of size H has standard deviation sqrt(H). A `scale` of
    1/sqrt(H) keeps the softmax from choosing a single token (Vaswani et al. 2017, 3.2.1).
    """
    return _attend(compared, compared, x, scale)


def projected_attention(
    x: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
) -> jax.Array:
    """a_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j, [T, Hv] (Vaswani et al. 2017, equation 1).

    q = x `query` and k = x `key` with matrices [D, H], v = x `value` with [D, Hv]. Scaled attention
    with c = x is the case of three unit matrices.
    """
    return _attend(x @ query, x @ key, x @ value, query.shape[1] ** -0.5)


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, scale: float) -> jax.Array:
    scores = query @ key.T * scale
    causal = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1) @ value


@dataclass(frozen=True)
class StepOptions:
    """The sizes of the example."""

    length: int = 6
    """Number of tokens."""
    d_model: int = 64
    """Size of a token's vector."""
    seed: int = 0
    """Seed of the random tokens and matrices."""

    def __post_init__(self):
        check_at_least(self, 1, "length", "d_model")


def main(options: StepOptions) -> None:
    """Prints the attention weights of the last token at each step."""
    rng = jax.random.key(options.seed)
    x = jax.random.normal(rng, (options.length, options.d_model))
    matrices = jax.random.normal(rng, (3, options.d_model, options.d_model))
    query, key, _ = matrices * options.d_model**-0.5
    # With one-hot values the result is the weights.
    tokens = jnp.eye(options.length)
    root = options.d_model**-0.5
    steps = {
        "uniform causal average": causal_average(tokens),
        "dot product": dot_product_attention(tokens, x),
        "scaled dot product": scaled_attention(tokens, x, root),
        "with projections Q and K": _attend(x @ query, x @ key, tokens, root),
    }
    print(f"weights of the last of {options.length} random tokens, d_model={options.d_model}")
    for name, weights in steps.items():
        print(f"{name:26}", " ".join(f"{weight:.3f}" for weight in weights[-1]))


if __name__ == "__main__":
    cli.start(main, {"default": StepOptions()}, __doc__)
