"""Cross-entropy as (sum in nats, number of tokens), from all logits at once or chunk by chunk."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.errors import ConfigError
from jaxformer.ops.partitioning import partitioned


def cross_entropy(
    logits: Float[Array, "*shape V"],
    labels: Int[Array, "*shape"],
    loss_mask: Bool[Array, "*shape"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum of -sum_v q(v) log p(v) in nats where `loss_mask` is True, and the number of these.

    Both are float32. q gives 1 - `label_smoothing` to the label and spreads `label_smoothing`
    evenly over all V (Szegedy et al. 2016; Vaswani et al. 2017, section 5.4). `z_loss` times
    log(Z)^2 is added for each token, where Z is the sum of exp(logits) (Chowdhery et al. 2022,
    section 5). A label outside the V classes makes the sum NaN where `loss_mask` is True. Raises
    `ConfigError` for a `loss_mask` that is not bool.

    >>> logits = jnp.log(jnp.array([[0.5, 0.5], [0.25, 0.75]]))  # of two tokens, V = 2
    >>> labels, loss_mask = jnp.array([0, 0]), jnp.array([True, True])
    >>> nats, count = jf.cross_entropy(logits, labels, loss_mask)
    >>> round(float(nats / jnp.log(2)), 4), float(count)  # 1 bit for 1/2, 2 bits for 1/4
    (3.0, 2.0)
    """
    if loss_mask.dtype != bool:
        raise ConfigError(
            f"loss_mask is of {loss_mask.dtype}, but must be bool, True where a token counts: give "
            "`loss_mask != 0`; weights of tokens are not supported"
        )
    nats = _cross_entropy(logits, labels, label_smoothing, z_loss)
    return jnp.sum(jnp.where(loss_mask, nats, 0.0)), jnp.sum(loss_mask, dtype=jnp.float32)


def chunked_sums(
    sums_of: Callable[..., tuple[Any, ...]],
    lm_head: Callable[[Float[Array, "M ... D"]], Float[Array, "M ... V"]],
    hidden: Float[Array, "... D"],
    *leaves: jax.Array,
    chunk: int,
) -> tuple[Any, ...]:
    """sums_of(logits, *leaves), of `chunk` tokens at a time.

    `logits` are `lm_head` of `hidden`. The tokens are the axes of the first leaf, such as labels;
    `hidden` and the other leaves may have further axes after these. `sums_of` returns (nats,
    *further), such as `cross_entropy`: each number is a sum over tokens, and 0 where all leaves
    are. A device that has some of the tokens computes at most `chunk` of its own at a time.

    The gradient of nats goes to `hidden` and to all arrays that `lm_head` uses, such as parameters;
    the leaves and the further sums have none. It is computed in the forward pass; the backward pass
    only scales it. Forward-mode derivatives (`jax.jvp`) are not supported. Raises `ValueError` for
    `chunk` below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk}, but it must be at least 1 token")
    chunk *= partitioned(("sequence",)).get("sequence", 1)  # each device has a part of a chunk
    shape = leaves[0].shape
    tokens = math.prod(shape)
    count = -(-tokens // chunk)
    size = -(-tokens // count)

    def split(leaf: jax.Array) -> jax.Array:
        return _split(leaf.reshape(tokens, *leaf.shape[len(shape) :]), count, size)

    hidden, leaves = jax.tree.map(split, (hidden, leaves))
    # A new function each time: JAX compares functions, and `lm_head` may equal one of other arrays.
    head, params = jax.closure_convert(lambda hidden: lm_head(hidden), hidden[0])
    sums: Any = _chunked(sums_of, head, params, hidden, leaves)
    return sums[0], *sums[1]


def token_log_probs(
    logits: Float[Array, "*shape V"], labels: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """The log-probability in nats of each of `labels` under `logits`; float32."""
    return -_cross_entropy(logits, labels, 0.0, 0.0)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _cross_entropy(
    logits: jax.Array, labels: jax.Array, label_smoothing: float, z_loss: float
) -> jax.Array:
    return _nats(logits, labels, label_smoothing, z_loss)[0]


@_cross_entropy.defjvp
def _cross_entropy_jvp(label_smoothing, z_loss, primals, tangents):
    # The automatic derivative scatters into a second array [..., V]. exp(logits - maximum) is
    # computed again: if the forward pass shared it, it would be kept in memory, in float32.
    logits, labels = primals
    nats, normalizer = _nats(logits, labels, label_smoothing, z_loss)
    # The slope is p - q; with z_loss it is (1 + 2 z_loss log(Z)) p - q.
    p = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None])
    if z_loss:
        p = p * (1.0 + 2.0 * z_loss * normalizer[..., None])
    # 8 bits could not count all classes.
    places = jax.lax.broadcasted_iota(jnp.uint32, p.shape, p.ndim - 1)
    hit = labels.astype(jnp.uint32)[..., None] == places
    share = label_smoothing / logits.shape[-1]
    slope = p - jnp.where(hit, 1.0 - label_smoothing + share, share)
    return nats, jnp.sum(slope * tangents[0].astype(jnp.float32), axis=-1)


def _nats(
    logits: jax.Array, labels: jax.Array, label_smoothing: float, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy [...] of `logits` [..., V] in nats, and their logsumexp [...]; float32."""
    label = _logits_of_labels(logits, labels)
    logits = logits.astype(jnp.float32)
    normalizer = logsumexp(logits)
    nats = normalizer - (1.0 - label_smoothing) * label.astype(jnp.float32)
    if label_smoothing:
        nats -= label_smoothing * jnp.mean(logits, axis=-1)
    if z_loss:
        nats += z_loss * jnp.square(normalizer)
    return nats, normalizer


def _logits_of_labels(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The logit [...] of each label in `logits` [..., V]; NaN for a label that is none."""
    classes = logits.shape[-1]
    places = jnp.minimum(labels.astype(jnp.uint32), classes)  # -1 would be the last class
    if len([size for size in partitioned().values() if size > 1]) < 2:
        return jnp.take_along_axis(logits, places[..., None], axis=-1)[..., 0]
    # XLA ends the process where it partitions a gather along both "sequence" and "tensor".
    every_class = jax.lax.broadcasted_iota(jnp.uint32, logits.shape, logits.ndim - 1)
    label = jnp.sum(jnp.where(places[..., None] == every_class, logits, 0), axis=-1)
    return jnp.where(places < classes, label, jnp.nan)


def logsumexp(logits: Float[Array, "*shape V"]) -> Float[Array, "*shape"]:
    """`jax.nn.logsumexp` over the last axis of float32 logits, as a platform computes it best."""
    return jax.lax.platform_dependent(
        logits,
        tpu=_logsumexp_by_product,
        cuda=_logsumexp_in_one_pass,
        default=partial(jax.nn.logsumexp, axis=-1),
    )


def _logsumexp_by_product(logits: jax.Array) -> jax.Array:
    """`jax.nn.logsumexp` over the last axis, whose sum is a float32 product with ones.

    A TPU's compiler computes it in half the cycles of a reduction.
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    ones = jnp.ones((logits.shape[-1], 8), logits.dtype)
    total = jnp.matmul(jnp.exp(logits - top), ones, precision=jax.lax.Precision.HIGHEST)
    return jnp.log(total[..., 0]) + top[..., 0]


@jax.custom_jvp  # JAX differentiates no reduction of pairs
def _logsumexp_in_one_pass(logits: jax.Array) -> jax.Array:
    """`jax.nn.logsumexp` over the last axis, which reads `logits` once; -inf counts as -1e30."""

    def add(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> Any:
        top = jnp.maximum(one[0], other[0])
        return top, one[1] * jnp.exp(one[0] - top) + other[1] * jnp.exp(other[0] - top)

    zero = jnp.float32(-1e30), jnp.float32(0)  # the largest logit, and the sum of exp(logit - it)
    pairs = logits, jnp.ones_like(logits)
    top, total = jax.lax.reduce(pairs, zero, add, (logits.ndim - 1,))
    return jnp.log(total) + top


@_logsumexp_in_one_pass.defjvp
def _logsumexp_jvp(primals, tangents):
    normalizer = _logsumexp_in_one_pass(*primals)
    p = jnp.exp(primals[0] - normalizer[..., None])
    return normalizer, jnp.sum(p * tangents[0], axis=-1)


def _split(leaf: jax.Array, count: int, size: int) -> jax.Array:
    """`leaf` [M, ...], with zeros at the end, as [count, size, ...]."""
    padding = [(0, count * size - leaf.shape[0])] + [(0, 0)] * (leaf.ndim - 1)
    return jnp.pad(leaf, padding).reshape(count, size, *leaf.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    sums_of: Callable[..., tuple[Any, ...]],
    head: Callable[..., jax.Array],
    params: Any,
    hidden: jax.Array,
    leaves: tuple[jax.Array, ...],
) -> tuple[jax.Array, list[Any]]:
    """The sums over all chunks: the first axis of `hidden` and `leaves`."""

    sums = jax.lax.map(lambda chunk: _of_chunk(sums_of, head, params, *chunk), (hidden, leaves))
    return _total(sums)


def _chunked_forward(sums_of, head, params, hidden, leaves):
    of_chunk = jax.value_and_grad(partial(_of_chunk, sums_of, head), argnums=(0, 1), has_aux=True)

    def add(grads, chunk):
        sums, (more, slopes) = of_chunk(params, *chunk)
        return jax.tree.map(jnp.add, grads, more), (sums, slopes)

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads, (sums, slopes) = jax.lax.scan(add, zeros, (hidden, leaves))
    return _total(sums), (grads, slopes)


def _chunked_backward(sums_of, head, slopes, cotangents):
    nats, _ = cotangents
    return *jax.tree.map(lambda leaf: leaf * nats.astype(leaf.dtype), slopes), None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _of_chunk(sums_of: Any, head: Any, params: Any, hidden: Any, leaves: Any) -> Any:
    nats, *further = sums_of(head(hidden, *params), *leaves)
    return nats, further


def _total(sums: Any) -> Any:
    return jax.tree.map(partial(jnp.sum, axis=0), sums)
