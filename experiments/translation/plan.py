"""The programs of a translation run that `experiments.plan` compiles, and the cost of a step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.harness.planning import PlannedTraining
from experiments.harness.training.build import build_model
from experiments.harness.training.flops import seq2seq_cost
from experiments.translation import train
from experiments.translation.prepare import with_start
from experiments.translation.presets import TranslationConfig
from jaxformer.distributed import Strategy
from jaxformer.pipelines import max_target_length, translate_ids
from jaxformer.pipelines.batching import padded_length
from jaxformer.text.data import Bucket, PairBatch
from jaxformer.text.tokenizers import PAD
from jaxformer.training.losses import seq2seq_loss


def longest(config: TranslationConfig) -> Bucket:
    """The bucket of pairs as long as the model allows, on both sides."""
    data, length = config.data, config.model.max_len
    multiple = data.batch_size_multiple * config.training.parts
    rows = max(data.batch_tokens // length // multiple, 1) * multiple
    return Bucket(length, length, rows)


def batch_of(config: TranslationConfig) -> PairBatch:
    """Zeros in the shape of `longest`."""
    return _pairs(*longest(config))


def others(
    config: TranslationConfig, model: Any, devices: Strategy, params: Any
) -> dict[str, Callable[[], Any]]:
    """The loss of the validation text, and beam search of its longest sentences."""
    loss = seq2seq_loss(model, pad=PAD, loss_chunk=config.training.loss_chunk)
    gather_at, dtype = config.training.gather_at, config.model.dtype
    source, target, rows = longest(config)
    rows = -(-rows // config.training.parts)
    pairs = _pairs(source, target, rows)
    sentences = config.translation.batch_size
    evaluate = devices.evaluate(loss, gather_at=gather_at, gather_dtype=dtype)
    return {
        "validation": lambda: evaluate.lower(params, devices.abstract_batch(pairs)),
        f"beam search of {sentences}": partial(_lower_search, config, model, devices, params),
    }


def _lower_search(
    config: TranslationConfig, model: Any, devices: Strategy, params: Any
) -> jax.stages.Lowered:
    """Lowers the beam search of a batch of the longest sentences."""
    size = padded_length(config.model.max_len, config.model.max_len)
    length = max_target_length(config.model, size, config.search, config.translation)
    sentences = config.translation.batch_size
    arrays = np.zeros((sentences, size), np.int32), np.ones(sentences, np.int32)
    with devices.active():
        divided = devices.abstract_batch(arrays, axes=("data",))
        search = replace(config.search, max_new_tokens=length)
        return translate_ids.lower(model, params, *divided, search=search)


def _pairs(source: int, target: int, rows: int) -> PairBatch:
    """Zeros in the shape of `rows` pairs."""
    return PairBatch(
        np.zeros((rows, source), np.int32),
        np.zeros((rows, target + 1), np.int32),
        np.arange(rows, dtype=np.int32),
    )


planned = PlannedTraining(
    prepare=with_start,
    batch=batch_of,
    build_model=build_model,
    make_step=train.make_step,
    cost=lambda config: seq2seq_cost(config.model, batch_of(config)),
    others=others,
)
