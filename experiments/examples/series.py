"""A small task for the examples: does the rise of a noisy series come before its fall?

The label depends on two positions together, so the model needs attention.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.ops.cross_entropy import cross_entropy
from jaxformer.training.losses import Loss


class SeriesBatch(NamedTuple):
    """B series of T numbers, `series` [B, T, 1]; `label` [B] is 1 where the rise comes first."""

    series: np.ndarray
    label: np.ndarray


def random_batch(seed: int, rows: int = 32, length: int = 11) -> SeriesBatch:
    """Returns noise of standard deviation 0.3 with +2 and -2 added at two positions."""
    rng = np.random.default_rng(seed)
    series = rng.normal(scale=0.3, size=(rows, length, 1)).astype(np.float32)
    positions = rng.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)[:, :2]
    for row, (rise, fall) in enumerate(positions):
        series[row, rise] += 2.0
        series[row, fall] -= 2.0
    return SeriesBatch(series, (positions[:, 0] < positions[:, 1]).astype(np.int32))


def loss_of(model: nn.Module) -> Loss:
    """Returns loss(params, batch, rng) of a model that gives two logits [B, 2]."""

    def loss(params: Any, batch: SeriesBatch, rng: jax.Array | None) -> Any:
        logits = jnp.asarray(model.apply({"params": params}, batch.series))
        return cross_entropy(logits, jnp.asarray(batch.label), jnp.ones(batch.label.shape, bool))

    return loss


def accuracy(logits: jax.Array, batch: SeriesBatch) -> float:
    """Returns the share of series whose greater logit is that of the label."""
    return float(np.mean(np.argmax(logits, axis=-1) == batch.label))
