"""The program of a cell, lowered for devices that are not here."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer import (
    DecoderOnly,
    EncoderDecoder,
    MaskedLanguageModel,
    OptimizerConfig,
    SamplingConfig,
    SearchConfig,
    TransformerConfig,
    beam_search,
    make_step_fn,
)
from jaxformer.config import (
    BERT_BASE,
    GPT2,
    LLAMA3_8B,
    TRANSFORMER_BASE,
    AttentionOptions,
    NormOptions,
)
from jaxformer.decoding import beam_more, row_values, sample_more
from jaxformer.distributed import Strategy, make_mesh, sharded
from jaxformer.nn.remat import REMAT
from jaxformer.ops.attention import auto_attention
from jaxformer.pipelines.decoding_weights import lay_out
from jaxformer.pipelines.reading import begin_rows
from jaxformer.pipelines.rows import search_more, state_shapes
from jaxformer.pipelines.sentences import begin_sentences
from jaxformer.text.data import MaskedBatch, PairBatch, StreamBatch
from jaxformer.training.losses import causal_loss, masked_loss, seq2seq_loss
from jaxformer.training.optimizer import make_optimizer
from jaxformer.training.train_step import init_train_state
from tests.compilers.grid.cells import MESHES, Cell

ROWS, LENGTH, PREDICTED = 16, 256, 40
"""Rows and positions of a batch, and the positions of a row that a masked model predicts."""
CACHE = 2048
"""Positions of a cache, and of a source that is translated."""
TEXTS = {"decode 1": 1, "decode 32": 32, "beam": 8}
BEAMS = 4

_SIZES = {
    "vocab_size": 2048,
    "d_model": 512,
    "d_ff": 1024,
    "num_heads": 8,
    "max_len": CACHE,
    "dtype": "bfloat16",
    "dropout_rate": 0.0,
    "scan_layers": False,
    "attention": AttentionOptions(),
}
CONFIGS: dict[str, TransformerConfig] = {
    "gpt": replace(GPT2, **_SIZES, num_decoder_layers=2),
    "llama": replace(
        LLAMA3_8B,
        **_SIZES | {"attention": AttentionOptions(num_kv_heads=4)},
        num_decoder_layers=2,
    ),
    "translator": replace(
        TRANSFORMER_BASE,
        **_SIZES,
        num_encoder_layers=2,
        num_decoder_layers=2,
        norm=NormOptions(placement="pre"),
    ),
    "bert": replace(BERT_BASE, **_SIZES, num_encoder_layers=2, pooler="none"),
}
"""Two layers of each family in a small width, in which the published structure is kept."""


class Lowered(NamedTuple):
    """A lowered program and the arrays that it is for.

    `params` are as the program gets them, `state` is all that a device keeps: parameters and state
    of the optimizer, or parameters and state of a search. Both have shardings.
    """

    lowered: jax.stages.Lowered
    config: TransformerConfig
    devices: Strategy
    params: Any
    state: Any


def lower(cell: Cell, devices: Sequence[jax.Device]) -> Lowered:
    """The program of `cell` for as many of `devices` as its mesh has."""
    mesh = make_mesh(MESHES[cell.mesh], list(devices))
    is_loss = cell.program in ("train", "validate")
    block = REMAT["blocks"] if cell.program == "train" else REMAT["none"]
    model = make_model(cell.family, block)
    strategy = sharded(mesh).for_model(model, *model_inputs(cell.family))
    if is_loss:
        return _lower_loss(cell, model, strategy)
    return _lower_search(cell, model, strategy)


def make_model(family: str, block: Any) -> Any:
    kinds = {"translator": EncoderDecoder, "bert": MaskedLanguageModel}
    return kinds.get(family, DecoderOnly)(CONFIGS[family], auto_attention, block)


def model_inputs(family: str) -> list[np.ndarray]:
    """What a model is initialised with."""
    return [np.zeros((2, 128), np.int32)] * (2 if family == "translator" else 1)


def init_params(family: str, model: Any) -> Any:
    return model.init(jax.random.key(0), *map(jnp.asarray, model_inputs(family)))["params"]


def _lower_loss(cell: Cell, model: Any, devices: Strategy) -> Lowered:
    """The training step, or the loss of a batch."""
    optimizer = make_optimizer(OptimizerConfig(grad_clip_norm=1.0))
    state = devices.abstract(
        lambda: init_train_state(init_params(cell.family, model), optimizer, jax.random.key(1))
    )
    batch, loss = _batch_and_loss(cell.family, model)
    batch = devices.abstract_batch(batch)
    options: Any = {"gather_at": cell.gather_at, "gather_dtype": model.config.dtype}
    if cell.program == "train":
        lowered = devices.step(loss, optimizer, **options).lower(state, batch)
        kept = (state.params, state.opt_state)
    else:
        lowered = devices.evaluate(loss, **options).lower(state.params, batch)
        kept = state.params
    return Lowered(lowered, model.config, devices, state.params, kept)


def _batch_and_loss(family: str, model: Any) -> tuple[Any, Any]:
    ids = np.zeros((ROWS, LENGTH + 1), np.int32)
    real = np.ones((ROWS, LENGTH), bool)
    rows = np.arange(ROWS, dtype=np.int32)
    if family == "translator":
        return PairBatch(ids[:, 1:], ids, rows), seq2seq_loss(model, pad=0, label_smoothing=0.1)
    if family == "bert":
        predicted = np.zeros((ROWS, PREDICTED), np.int32)
        batch = MaskedBatch(
            tokens=ids[:, 1:],
            padding_mask=real,
            token_type_ids=ids[:, 1:],
            masked_positions=predicted,
            labels=predicted,
            loss_mask=np.ones((ROWS, PREDICTED), bool),
            example_ids=rows,
            next_sentence=rows,
        )
        return batch, masked_loss(model)
    return StreamBatch(ids, real, rows), causal_loss(model)


def _lower_search(cell: Cell, model: Any, devices: Strategy) -> Lowered:
    """One piece of a search, with parameters as `prepare` lays them out."""
    params = devices.abstract(lambda: lay_out(model, init_params(cell.family, model))[1])
    texts = TEXTS[cell.program]
    if cell.family != "translator" and cell.program == "beam":
        return _lower_beams_of_decoder(model, devices, params, texts)
    begin: Callable[..., Any]
    if cell.family == "translator":
        search = SearchConfig(
            beam_size=BEAMS if cell.program == "beam" else 1, max_new_tokens=CACHE
        )
        source, limits = np.zeros((texts, CACHE), np.int32), np.ones(texts, np.int32)

        def begin(params: Any) -> Any:
            values = row_values(search, texts)
            return begin_sentences(model, params, source, limits, values, search, 1, 0)

        more = beam_more
    else:
        sampling = SamplingConfig(max_new_tokens=CACHE)
        begin = partial(begin_rows, model, rows=texts, config=sampling, cache_length=CACHE)
        more = sample_more
    state, number = state_shapes(devices, texts, begin, params), np.int32(1)
    with devices.active():
        stop = np.zeros(texts, bool)
        lowered = search_more.lower(model, params, state, stop, number, number, more=more)
    return Lowered(lowered, model.config, devices, params, (params, state))


def _lower_beams_of_decoder(model: Any, devices: Strategy, params: Any, texts: int) -> Lowered:
    search = SearchConfig(beam_size=BEAMS, max_new_tokens=CACHE)

    def decode(params: Any, bos: Any, limits: Any) -> Any:
        cache = model.apply(
            {"params": params}, texts, max_length=CACHE, num_beams=BEAMS, method="init_cache"
        )
        return beam_search(make_step_fn(model, params), cache, bos, limits, search)

    rows = NamedSharding(devices.mesh, PartitionSpec("data"))
    numbers = jax.ShapeDtypeStruct((texts,), jnp.int32, sharding=rows)
    with devices.active():
        lowered = jax.jit(decode).lower(params, numbers, numbers)
    return Lowered(lowered, model.config, devices, params, params)
