"""A small task for the examples: in a noisy series, does the rise come before the fall?

It needs attention: only together do the two places decide, and neither alone.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxformer.config import TransformerConfig
from jaxformer.losses import Loss, cross_entropy

SIZES = TransformerConfig(
    vocab_size=1, d_model=16, d_ff=24, num_heads=2, num_encoder_layers=1, norm_placement="pre"
)
"""Those of the examples. Nothing is looked up, so no vocabulary is needed."""


class SeriesBatch(NamedTuple):
    """B series of T numbers, `series` [B, T, 1], and whether the rise comes first, `label` [B]."""

    series: np.ndarray
    label: np.ndarray


def draw(seed: int, rows: int = 32, length: int = 11) -> SeriesBatch:
    """Noise of deviation 0.3 with +2 and -2 added at two places; every seed another batch."""
    rng = np.random.default_rng(seed)
    series = rng.normal(scale=0.3, size=(rows, length, 1)).astype(np.float32)
    places = rng.permuted(np.tile(np.arange(length), (rows, 1)), axis=1)[:, :2]
    for row, (rise, fall) in enumerate(places):
        series[row, rise] += 2.0
        series[row, fall] -= 2.0
    return SeriesBatch(series, (places[:, 0] < places[:, 1]).astype(np.int32))


def loss_of(model: nn.Module) -> Loss:
    """loss(params, batch, rng) of a model that gives two logits [B, 2] a series."""

    def loss(params: Any, batch: SeriesBatch, rng: jax.Array | None) -> Any:
        logits = model.apply({"params": params}, batch.series)
        return cross_entropy(logits, batch.label, jnp.ones(batch.label.shape, bool))

    return loss


def share_right(logits: jax.Array, batch: SeriesBatch) -> float:
    """The share of series whose greater logit is right."""
    return float(np.mean(np.argmax(logits, axis=-1) == batch.label))
