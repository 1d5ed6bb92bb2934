"""Losses that are no sums over rows: each device takes the rows of all by `jf.gather_rows`.

`--training.loss experiments.examples.whole_batch_losses:contrastive_loss` trains a language model
with the first one. A step on a mesh is then the step of one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxformer as jf


def contrastive_loss(
    model: jf.DecoderOnly, *, weight: float = 0.1, temperature: float = 0.05, loss_chunk: int = 0
) -> jf.Loss:
    """`causal_loss`, and the loss of finding the second half of each row by its first.

    As in SimCSE (Gao et al. 2021), with halves of a text for its two views. The vector of a half is
    the mean of its tokens' vectors; the halves of all other rows are wrong answers.
    """
    predict = jf.causal_loss(model, loss_chunk=loss_chunk)

    def loss(params: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        nats, count, *_ = predict(params, batch, rng)
        length = batch.tokens.shape[1] // 2

        def unit_vectors(tokens: jax.Array) -> Any:
            real = jnp.ones(tokens.shape, bool)
            vectors: Any = model.apply({"params": params}, tokens, real, mean=True, method="pooled")
            return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)

        first = unit_vectors(batch.tokens[:, :length])
        second = unit_vectors(batch.tokens[:, length : 2 * length])
        # [rows of this device, rows of all devices]
        similarities = first @ jf.gather_rows(second).T / temperature
        found = optax.softmax_cross_entropy_with_integer_labels(similarities, jf.row_numbers(first))
        return nats + weight * found.sum() * count / len(first), count

    return loss


def expert_balance(probabilities: jax.Array) -> jax.Array:
    """The balance of E experts, times the tokens of this device: a term of a loss.

    `probabilities` [B, T, E] are a router's. It is E times the sum over experts of the share
    of tokens that choose an expert and its mean probability, both over the whole batch: 1 where all
    are alike, E where one expert gets all (Fedus et al. 2022, equation 4).
    """
    count = probabilities.shape[-1]
    everywhere = jf.gather_rows(probabilities).reshape(-1, count)
    chosen = jax.nn.one_hot(everywhere.argmax(axis=-1), count)
    balance = count * jnp.sum(chosen.mean(axis=0) * everywhere.mean(axis=0))
    return balance * probabilities.shape[0] * probabilities.shape[1]
