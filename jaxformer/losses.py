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
    logits = logits.astype(jnp.float32)
    label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - (1.0 - smoothing) * label
    return nats - smoothing * jnp.mean(logits, axis=-1) if smoothing else nats


@_cross_entropy.defjvp
def _cross_entropy_jvp(smoothing, primals, tangents):
    # p - q in one elementwise pass; the automatic derivative scatters into a second [..., V].
    logits, labels = primals
    size = logits.shape[-1]
    p = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    hit = labels[..., None] == jax.lax.broadcasted_iota(labels.dtype, p.shape, p.ndim - 1)
    slope = p - jnp.where(hit, 1.0 - smoothing + smoothing / size, smoothing / size)
    change = jnp.sum(slope * tangents[0].astype(jnp.float32), axis=-1)
    return _cross_entropy(logits, labels, smoothing), change


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
