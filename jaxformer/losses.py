"""Losses as (sum, tokens): sums cross batches and devices, and division happens once, last."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.dropout import Noise

Loss = Callable[[Any, Any, jax.Array | None], tuple[jax.Array, jax.Array]]
"""loss(params, batch, rng) -> (sum in nats, number of tokens); rng None means no dropout."""


def cross_entropy(
    logits: jax.Array, labels: jax.Array, valid: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """The sum over `valid` of -sum_v q(v) log p(v) in nats, and how many are valid; float32.

    `logits` [..., V], `labels` and `valid` [...]. q gives 1 - `smoothing` to the label and
    spreads `smoothing` evenly over all V (Szegedy et al. 2016; Vaswani et al. 2017, 5.4).
    """
    nats = _cross_entropy(logits, labels, smoothing)
    return jnp.sum(jnp.where(valid, nats, 0.0)), jnp.sum(valid, dtype=jnp.float32)


def token_log_probs(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The log-probability in nats of each of `labels` [...] under `logits` [..., V]; float32."""
    return -_cross_entropy(logits, labels, 0.0)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _cross_entropy(logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
    return _nats(logits, labels, smoothing)[0]


@_cross_entropy.defjvp
def _cross_entropy_jvp(smoothing, primals, tangents):
    # Written out: the automatic derivative scatters into a second [..., V]. And from the logits
    # anew: exp(logits - maximum), shared with the forward pass, would be kept, in float32.
    logits, labels = primals
    nats, normalizer = _nats(logits, labels, smoothing)
    slope = _slope(logits, labels, normalizer, smoothing)
    return nats, jnp.sum(slope * tangents[0].astype(jnp.float32), axis=-1)


def _nats(logits: jax.Array, labels: jax.Array, smoothing: float) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy [...] of `logits` [..., V] in nats, and their logsumexp [...]; float32."""
    label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    logits = logits.astype(jnp.float32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    nats = normalizer - (1.0 - smoothing) * label.astype(jnp.float32)
    if smoothing:
        nats -= smoothing * jnp.mean(logits, axis=-1)
    return nats, normalizer


def _slope(
    logits: jax.Array, labels: jax.Array, normalizer: jax.Array, smoothing: float
) -> jax.Array:
    """The derivative p - q [..., V] of the cross-entropy by its logits; float32."""
    size = logits.shape[-1]
    p = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None])
    hit = labels[..., None] == jax.lax.broadcasted_iota(labels.dtype, p.shape, p.ndim - 1)
    return p - jnp.where(hit, 1.0 - smoothing + smoothing / size, smoothing / size)


def seq2seq_loss(model: nn.Module, *, pad: int, smoothing: float = 0.0) -> Loss:
    """The loss of an encoder-decoder on batches of `source` [B, S] and `target` [B, T + 1].

    `target` begins with the start token: position t is predicted from those before it. The id
    `pad` marks padding on both sides.
    """

    def loss(params, batch, rng):
        noise = None if rng is None else Noise.of(rng, batch.row)
        inputs, labels = batch.target[:, :-1], batch.target[:, 1:]
        logits = model.apply(
            {"params": params}, batch.source, inputs, batch.source != pad, noise=noise
        )
        return cross_entropy(logits, labels, labels != pad, smoothing)

    return loss


def causal_loss(model: nn.Module) -> Loss:
    """The loss of a causal language model on batches of `tokens` [B, T + 1].

    Label t is token t + 1, and counts where `valid` [B, T] is true. `segments` and `positions`
    [B, T + 1] tell packed documents apart, or are None.
    """

    def loss(params, batch, rng):
        noise = None if rng is None else Noise.of(rng, batch.row)
        facts = (batch.tokens, batch.segments, batch.positions)
        inputs = (None if fact is None else fact[:, :-1] for fact in facts)
        logits = model.apply({"params": params}, *inputs, noise=noise)
        return cross_entropy(logits, batch.tokens[:, 1:], batch.valid)

    return loss


def masked_loss(model: nn.Module) -> Loss:
    """The loss of a masked language model at the positions `at` [B, P] of `tokens` [B, T].

    The labels [B, P] count where `valid` [B, P] is true (Devlin et al. 2019, task 1).
    """

    def loss(params, batch, rng):
        logits, _ = _masked(model, params, batch, rng)
        return cross_entropy(logits, batch.labels, batch.valid)

    return loss


def masked_and_next_sentence_loss(model: nn.Module) -> Loss:
    """`masked_loss`, and P times that of telling whether sentence B follows A, a row.

    Divided by the number of predicted tokens this is the sum of two means, the loss of Devlin
    et al. 2019 (appendix A.2), where each row has P of them. `follows` [B] is 1 or 0.
    """

    def loss(params, batch, rng):
        logits, follows = _masked(model, params, batch, rng)
        nats, tokens = cross_entropy(logits, batch.labels, batch.valid)
        real = batch.present.any(axis=-1)
        sentence, _ = cross_entropy(follows, batch.follows, real)
        return nats + batch.at.shape[1] * sentence, tokens

    return loss


def classification_loss(model: nn.Module) -> Loss:
    """The loss of a classifier on `tokens` [B, T] of one of the classes `labels` [B].

    `present` [B, T] is False at padding; rows count where `valid` [B] is true.
    """

    def loss(params, batch, rng):
        noise = None if rng is None else Noise.of(rng, batch.row)
        logits = model.apply({"params": params}, batch.tokens, batch.present, noise=noise)
        return cross_entropy(logits, batch.labels, batch.valid)

    return loss


def _masked(model: nn.Module, params: Any, batch: Any, rng: jax.Array | None):
    noise = None if rng is None else Noise.of(rng, batch.row)
    inputs = batch.tokens, batch.present, batch.types, batch.at
    return model.apply({"params": params}, *inputs, noise=noise)
