"""Variants of the tables of results, for `experiments.sweep --cells`."""

from collections.abc import Iterator
from typing import Any


def choices_of_the_paper() -> Iterator[dict[str, Any]]:
    """A preset, and one choice of Vaswani et al. 2017 changed at a time (as in their table 3).

    `multi30k_tiny` has 4 heads, 4 + 4 layers, pre-norm, sinusoidal positions, dropout 0.3 and label
    smoothing 0.1.
    """
    yield {}
    yield {"model.num_heads": 1}
    yield {"model.num_heads": 16}
    yield {"model.num_encoder_layers": 2, "model.num_decoder_layers": 2}
    yield {"model.dropout_rate": 0.0}
    yield {"training.label_smoothing": 0.0}
    yield {"model.positions": "learned"}
    yield {"model.positions": "rotary"}
    yield {"model.norm.placement": "post"}
