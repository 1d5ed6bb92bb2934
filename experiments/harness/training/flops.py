"""FLOPs of a training step by the model's equations.

Matrix products count two FLOPs per multiply-add: projections, feed-forward networks, heads, and
attention to the keys that a query may see (a causal query at position t sees t + 1 keys).
A position counts the experts that it has chosen. Embedding look-ups, norms, softmax and the
optimizer are not counted. A training step is three times the forward pass: the backward pass has
products for inputs and for weights. Recomputation (`remat`) is not counted; padding and other
documents in a row are.
"""

import math
from typing import Any

import jax
import numpy as np

from experiments.harness.training.task import Cost
from jaxformer.config import TransformerConfig


def rows_and_length(leaf: jax.Array | np.ndarray) -> tuple[int, int]:
    """B and T of a leaf [..., T] of a sharded batch, where B may be several axes."""
    return math.prod(leaf.shape[:-1]), leaf.shape[-1]


_FORWARD_AND_BACKWARD = 3


def causal_flops(config: TransformerConfig, rows: int, length: int) -> int:
    """FLOPs of a step of a `DecoderOnly` on tokens [rows, length]."""
    positions = rows * length
    block = _self_attention(config, positions, rows * _triangle(length))
    block += _feed_forward(config, positions)
    head = 2 * positions * config.d_model * config.vocab_size
    return _FORWARD_AND_BACKWARD * (config.num_decoder_layers * block + head)


def masked_flops(config: TransformerConfig, rows: int, length: int, predicted: int) -> int:
    """FLOPs of a step of a `MaskedLanguageModel` on [rows, length], `predicted` masks per row."""
    positions, width = rows * length, config.d_model
    block = _self_attention(config, positions, rows * length**2)
    block += _feed_forward(config, positions)
    head = 2 * rows * predicted * width * (width + config.vocab_size)
    if config.pooler != "none":
        head += 2 * rows * width * (width + 2)
    return _FORWARD_AND_BACKWARD * (config.num_encoder_layers * block + head)


def seq2seq_flops(config: TransformerConfig, rows: int, source: int, target: int) -> int:
    """FLOPs of a step of an `EncoderDecoder` on source [rows, source], target [rows, target]."""
    read, written = rows * source, rows * target
    encoder = _self_attention(config, read, rows * source**2) + _feed_forward(config, read)
    decoder = _self_attention(config, written, rows * _triangle(target))
    decoder += _projections(config, written, read) + _attention(config, rows * source * target)
    decoder += _feed_forward(config, written)
    blocks = config.num_encoder_layers * encoder + config.num_decoder_layers * decoder
    head = 2 * written * config.d_model * config.vocab_size
    return _FORWARD_AND_BACKWARD * (blocks + head)


def seq2seq_cost(config: TransformerConfig, batch: Any) -> Cost:
    """The cost of a step on a placed `PairBatch`."""
    positions = batch.target.size - batch.example_ids.size
    rows, source_length = rows_and_length(batch.source)
    target_length = batch.target.shape[-1] - 1
    return Cost(positions, seq2seq_flops(config, rows, source_length, target_length))


def _triangle(length: int) -> int:
    """The number of (query, key) pairs where the key is not after the query."""
    return length * (length + 1) // 2


def _self_attention(config: TransformerConfig, positions: int, pairs: int) -> int:
    return _projections(config, positions, positions) + _attention(config, pairs)


def _projections(config: TransformerConfig, queries: int, keys: int) -> int:
    """The projections of queries, keys and values, and the output projection."""
    heads = config.num_heads * (config.key_size + config.value_size)
    shared = config.kv_heads * (config.key_size + config.value_size)
    return 2 * config.d_model * (queries * heads + keys * shared)


def _attention(config: TransformerConfig, pairs: int) -> int:
    """Scores and weighted values of `pairs` (query, key) pairs."""
    return 2 * pairs * config.num_heads * (config.key_size + config.value_size)


def _feed_forward(config: TransformerConfig, positions: int) -> int:
    """The network of each position; with experts the chosen ones, the shared one and the router."""
    matrices = 3 if config.feed_forward.gated else 2
    width, experts = config.d_ff, config.feed_forward.experts
    if experts is None:
        return 2 * positions * matrices * config.d_model * width
    width = experts.top_k * width + (experts.shared_d_ff or 0)
    return 2 * positions * config.d_model * (matrices * width + experts.num_experts)
