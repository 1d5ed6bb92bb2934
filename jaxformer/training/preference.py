"""Preference tuning (Rafailov et al. 2023): the chosen one of two answers becomes likelier.

The reference is the model before the training. It does not change, so the log-probabilities of the
answers under it are part of the batch: they are computed once, and no second model is kept.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int

from jaxformer.ops.cross_entropy import token_log_probs
from jaxformer.ops.dropout import DropoutRng
from jaxformer.ops.masks import AnyArray
from jaxformer.training.losses import AnyModel, Loss


class PreferenceBatch(NamedTuple):
    """B pairs of texts that end with the chosen and, second, the rejected answer.

    Padding is at the ends of texts. A pair without a token of an answer does not count.
    """

    tokens: Int[AnyArray, "B 2 L"]
    """L = T + 1 ids of each text."""
    loss_mask: Bool[AnyArray, "B 2 T"]
    """True where the label, the next token, is one of an answer."""
    reference: Float[AnyArray, "B 2"]
    """The log-probability in nats of each answer under the reference (see `answer_log_probs`)."""
    example_ids: Int[AnyArray, " B"]


def answer_log_probs(
    model: AnyModel, params: Any, batch: PreferenceBatch, rng: jax.Array | None = None
) -> Float32[jax.Array, "B 2"]:
    """The log-probability in nats of each answer of `batch`, the sum over its tokens.

    `rng` is the key of dropout; None means no dropout.
    """
    rows, _, length = batch.tokens.shape
    tokens = jnp.asarray(batch.tokens).reshape(2 * rows, length)
    dropout_rng = None
    if rng is not None:  # both texts of a pair have their own masks
        ids = 2 * jnp.asarray(batch.example_ids)[:, None] + jnp.arange(2)[None]
        dropout_rng = DropoutRng(rng, ids.reshape(-1))
    logits: Any = model.apply({"params": params}, tokens[:, :-1], dropout_rng=dropout_rng)
    nats = token_log_probs(logits, tokens[:, 1:]).reshape(rows, 2, length - 1)
    return jnp.sum(jnp.where(batch.loss_mask, nats, 0.0), axis=-1)


def preference_loss(model: AnyModel, *, beta: float = 0.1) -> Loss:
    """The loss of direct preference optimization on a `PreferenceBatch` (equation 7).

    The margin of a pair is `beta` times how much more the model than the reference prefers the
    chosen to the rejected answer, in nats; its loss is -log(sigmoid(margin)). The sums "accuracy",
    of the pairs with a margin above 0, and "margin" are divided by the number of pairs, as the
    loss is.

    >>> config = jf.TransformerConfig(11, d_model=8, d_ff=12, num_heads=2, num_decoder_layers=1)
    >>> model, tokens = jf.DecoderOnly(config), jnp.ones((3, 2, 6), int)
    >>> answers = jnp.ones((3, 2, 5), bool)
    >>> batch = PreferenceBatch(tokens, answers, jnp.zeros((3, 2)), jnp.arange(3))
    >>> params = model.init(jax.random.key(0), tokens[:, 0])["params"]
    >>> reference = answer_log_probs(model, params, batch)
    >>> batch = batch._replace(reference=reference)
    >>> nats, pairs, sums = preference_loss(model)(params, batch, None)
    >>> float(pairs), round(float(jnp.exp(nats / pairs)), 3)  # no pair is preferred yet
    (3.0, 2.0)
    """

    def loss(params, batch, rng):
        gains = answer_log_probs(model, params, batch, rng) - batch.reference
        margin = beta * (gains[:, 0] - gains[:, 1])
        counts = jnp.any(batch.loss_mask, axis=(1, 2)).astype(jnp.float32)
        sums = {
            "accuracy": jnp.sum(jnp.where(margin > 0.0, counts, 0.0)),
            "margin": jnp.sum(counts * margin),
        }
        return -jnp.sum(counts * jax.nn.log_sigmoid(margin)), jnp.sum(counts), sums

    return loss
