"""Losses as (sum, tokens): sums cross batches and devices, and division happens once, last."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxformer.dropout import Noise

Loss = Callable[[Any, Any, jax.Array | None], tuple[jax.Array, jax.Array]]
"""loss(params, batch, rng) -> (sum in nats, number of tokens); rng None means no dropout."""


class Readout(NamedTuple):
    """Logits not multiplied out yet, for a loss that never holds them all."""

    features: jax.Array  # [..., D], in the dtype of the logits
    matrix: jax.Array  # [D, V]
    bias: jax.Array | None  # [V]

    def logits(self) -> jax.Array:
        """`features` times `matrix` and `bias` added: [..., V]."""
        matrix = self.matrix.astype(self.features.dtype)
        # In matrices as `product` does, but not in parts: of a transposed table they are copies.
        logits = self.features.reshape(-1, matrix.shape[0]) @ matrix
        logits = logits.reshape(*self.features.shape[:-1], -1)
        if self.bias is None:
            return logits
        return logits + self.bias.astype(logits.dtype).reshape((1,) * (logits.ndim - 1) + (-1,))


def cross_entropy(
    logits: jax.Array, labels: jax.Array, valid: jax.Array, smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """The sum over `valid` of -sum_v q(v) log p(v) in nats, and how many are valid; float32.

    `logits` [..., V], `labels` and `valid` [...]. q gives 1 - `smoothing` to the label and
    spreads `smoothing` evenly over all V (Szegedy et al. 2016; Vaswani et al. 2017, 5.4).
    """
    nats = _cross_entropy(logits, labels, smoothing)
    return jnp.sum(jnp.where(valid, nats, 0.0)), jnp.sum(valid, dtype=jnp.float32)


def linear_cross_entropy(
    readout: Readout,
    labels: jax.Array,
    valid: jax.Array,
    smoothing: float = 0.0,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """`cross_entropy` of `readout.logits()`, of which at most `chunk` tokens' exist at a time.

    A gradient costs no further product: each chunk's is computed with its loss and only scaled
    later. It is by reverse mode alone (no `jax.jvp`). Raises `ValueError` for `chunk` below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} tokens at a time, but there must be at least 1")
    count = -(-labels.size // chunk)
    cut = partial(_cut, count=count, size=-(-labels.size // count))
    features = cut(readout.features.reshape(labels.size, -1))
    labels, flags = cut(labels.reshape(-1)), cut(valid.reshape(-1))
    nats = _summed(readout._replace(features=features), labels, flags, smoothing)
    return nats, jnp.sum(valid, dtype=jnp.float32)


class Head(NamedTuple):
    """How a loss gets from a model to its labels: what it asks of the model, what it makes of that.

    `method` is called as the model's `__call__` is; `cross_entropy(answer, labels, valid,
    smoothing)` gives (sum in nats, number of tokens).
    """

    method: str
    cross_entropy: Callable[..., tuple[jax.Array, jax.Array]]


whole = Head("__call__", cross_entropy)
"""All logits at once."""


@cache
def chunked(tokens: int) -> Head:
    """The logits of `tokens` tokens at a time, with the same sums and gradients.

    For models with a method `readout`; the memory is that of one chunk's logits.
    """
    return Head("readout", partial(linear_cross_entropy, chunk=tokens))


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


def _cut(leaf: jax.Array, *, count: int, size: int) -> jax.Array:
    """`leaf` [M, ...] and zeros behind it as [count, size, ...]."""
    padding = [(0, count * size - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
    return jnp.pad(leaf, padding).reshape(count, size, *leaf.shape[1:])


def _sum(readout: Readout, labels: jax.Array, valid: jax.Array, smoothing: float) -> jax.Array:
    return cross_entropy(readout.logits(), labels, valid, smoothing)[0]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(readout: Readout, labels: jax.Array, valid: jax.Array, smoothing: float) -> jax.Array:
    """The sum of `_sum` over the first axis of features, labels and valid."""

    def add(total, part):
        features, *facts = part
        return total + _sum(readout._replace(features=features), *facts, smoothing), None

    return jax.lax.scan(add, jnp.zeros(()), (readout.features, labels, valid))[0]


def _summed_forward(readout, labels, valid, smoothing):
    def add(sums, part):
        features, *facts = part
        differentiate = jax.value_and_grad(_sum)
        total, slope = differentiate(readout._replace(features=features), *facts, smoothing)
        return jax.tree.map(jnp.add, sums, (total, slope._replace(features=()))), slope.features

    zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), readout._replace(features=())))
    (total, slope), features = jax.lax.scan(add, zeros, (readout.features, labels, valid))
    return total, slope._replace(features=features)


def _summed_backward(smoothing, slope, cotangent):
    return jax.tree.map(lambda leaf: leaf * cotangent.astype(leaf.dtype), slope), None, None


_summed.defvjp(_summed_forward, _summed_backward)


def seq2seq_loss(model: nn.Module, *, pad: int, smoothing: float = 0.0, head: Head = whole) -> Loss:
    """The loss of an encoder-decoder on batches of `source` [B, S] and `target` [B, T + 1].

    `target` begins with the start token: position t is predicted from those before it. The id
    `pad` marks padding on both sides.
    """

    def loss(params, batch, rng):
        noise = None if rng is None else Noise.of(rng, batch.row)
        inputs, labels = batch.target[:, :-1], batch.target[:, 1:]
        inputs = batch.source, inputs, batch.source != pad
        answer = model.apply({"params": params}, *inputs, noise=noise, method=head.method)
        return head.cross_entropy(answer, labels, labels != pad, smoothing)

    return loss


def causal_loss(model: nn.Module, *, head: Head = whole) -> Loss:
    """The loss of a causal language model on batches of `tokens` [B, T + 1].

    Label t is token t + 1, and counts where `valid` [B, T] is true. `segments` and `positions`
    [B, T + 1] tell packed documents apart, or are None.
    """

    def loss(params, batch, rng):
        noise = None if rng is None else Noise.of(rng, batch.row)
        facts = (batch.tokens, batch.segments, batch.positions)
        inputs = (None if fact is None else fact[:, :-1] for fact in facts)
        answer = model.apply({"params": params}, *inputs, noise=noise, method=head.method)
        return head.cross_entropy(answer, batch.tokens[:, 1:], batch.valid)

    return loss


def masked_loss(model: nn.Module, *, head: Head = whole) -> Loss:
    """The loss of a masked language model at the positions `at` [B, P] of `tokens` [B, T].

    The labels [B, P] count where `valid` [B, P] is true (Devlin et al. 2019, task 1).
    """

    def loss(params, batch, rng):
        answer, _ = _masked(model, params, batch, rng, head.method)
        return head.cross_entropy(answer, batch.labels, batch.valid)

    return loss


def masked_and_next_sentence_loss(model: nn.Module, *, head: Head = whole) -> Loss:
    """`masked_loss`, and P times that of telling whether sentence B follows A, a row.

    Divided by the number of predicted tokens this is the sum of two means, the loss of Devlin
    et al. 2019 (appendix A.2), where each row has P of them. `follows` [B] is 1 or 0.
    """

    def loss(params, batch, rng):
        answer, follows = _masked(model, params, batch, rng, head.method)
        nats, tokens = head.cross_entropy(answer, batch.labels, batch.valid)
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


def _masked(model: nn.Module, params: Any, batch: Any, rng: jax.Array | None, method: str):
    noise = None if rng is None else Noise.of(rng, batch.row)
    inputs = batch.tokens, batch.present, batch.types, batch.at
    return model.apply({"params": params}, *inputs, noise=noise, method=method)
