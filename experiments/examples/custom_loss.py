"""A loss of your own, for a language model: `--training.loss` with the name of `focal_loss`.

The command calls `focal_loss(model)`, and adds `loss_chunk`, `z_loss` and `balance` where options
set them: a loss that lacks the argument is then refused. A sum over tokens and their number come
back, so that parts of a batch, devices and hosts can be added up before one division.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxformer as jf


def focal_loss(model: jf.DecoderOnly, *, gamma: float = 2.0) -> jf.Loss:
    """Cross-entropy times (1 - p)^gamma, where p is the probability of the right token.

    Tokens that the model already knows count less (Lin et al. 2017, equation 4). With `gamma` 0 it
    is `jf.causal_loss`.
    """

    def loss(
        params: Any, batch: jf.StreamBatch, rng: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        # The model reads all tokens but the last, and is asked for all but the first.
        tokens, labels = batch.tokens[:, :-1], batch.tokens[:, 1:]  # [B, T]
        # Several documents may share a row; `segments` and `positions` keep them apart.
        segments = None if batch.segments is None else batch.segments[:, :-1]
        positions = None if batch.positions is None else batch.positions[:, :-1]
        # Dropout depends on the numbers of the examples, so that it is the same on any devices.
        examples = jnp.asarray(batch.example_ids)
        dropout_rng = None if rng is None else jf.DropoutRng(rng, examples)
        logits: Any = model.apply(
            {"params": params}, tokens, segments, positions, dropout_rng=dropout_rng
        )  # [B, T, V]
        nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        focal = (1.0 - jnp.exp(-nats)) ** gamma * nats
        return jnp.sum(focal, where=batch.loss_mask), jnp.sum(batch.loss_mask, dtype=jnp.float32)

    return loss
