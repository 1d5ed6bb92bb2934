"""The programs of a language model that `experiments.plan` compiles, and the cost of a step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from experiments.harness.planning import PlannedTraining
from experiments.harness.training import Cost, build_model
from experiments.language_modelling.load_run import with_pretrained_sizes
from experiments.language_modelling.objectives import objective_of
from experiments.language_modelling.presets import LanguageConfig
from experiments.language_modelling.train import make_step
from jaxformer.decoding import sample_more
from jaxformer.distributed import Strategy
from jaxformer.pipelines.batching import BATCH_SIZE
from jaxformer.pipelines.reading import begin_rows, text_size
from jaxformer.pipelines.rows import num_rows, search_more, state_shapes
from jaxformer.text.data import MaskedBatch, StreamBatch, Tokens
from jaxformer.text.tokenizers import SpecialTokens

_PROMPT = 17
"""Tokens of a prompt that is continued."""


def batch_of(config: LanguageConfig) -> StreamBatch | MaskedBatch:
    """A batch of the run's stream over documents of random ids."""
    rows, length, size = config.data.batch_size, config.data.seq_len, config.model.vocab_size
    ids = np.random.default_rng(0).integers(0, size, (2 * rows, length + 1), np.int32)
    tokenizer: Any = SimpleNamespace(special=SpecialTokens(0, 1, 2, 3, 4), vocab_size=size)
    return objective_of(config).stream(Tokens.from_lists(ids), tokenizer, config).batch(0)


def cost_of(config: LanguageConfig) -> Cost:
    """The tokens that a step reads, and its FLOPs."""
    flops = objective_of(config).flops(config.model, batch_of(config))
    return Cost(config.data.batch_size * config.data.seq_len, flops)


def others(
    config: LanguageConfig, model: Any, devices: Strategy, params: Any
) -> dict[str, Callable[[], Any]]:
    """The loss of the validation text, and the continuation of the prompts."""
    loss = objective_of(config).measure(model, loss_chunk=config.training.loss_chunk)
    gather_at, dtype = config.training.gather_at, config.model.dtype
    evaluate = devices.evaluate(loss, gather_at=gather_at, gather_dtype=dtype)
    rows = -(-config.data.batch_size // config.training.parts)
    batch = jax.tree.map(lambda leaf: leaf[:rows], batch_of(config))
    programs = {"validation": lambda: evaluate.lower(params, devices.abstract_batch(batch))}
    if config.objective == "masked":
        return programs
    count = 3 if config.prompts is None else max(len(config.prompts), 1)
    lower = partial(_lower_sampling, config, count, model, devices, params)
    return programs | {f"sampling of {count}": lower}


def _lower_sampling(
    config: LanguageConfig, texts: int, model: Any, devices: Strategy, params: Any
) -> jax.stages.Lowered:
    """Lowers the continuation of `texts` prompts that are read."""
    size = min(text_size(_PROMPT + config.sampling.max_new_tokens), config.model.max_len)
    rows = num_rows(texts, BATCH_SIZE, devices.mesh.shape["data"])
    sampling = replace(config.sampling, max_new_tokens=size)
    begin = partial(begin_rows, model, rows=rows, config=sampling, cache_length=size)
    state, number = state_shapes(devices, rows, begin, params), np.int32(1)
    with devices.active():
        stop = np.zeros(rows, bool)
        return search_more.lower(model, params, state, stop, number, number, more=sample_more)


planned = PlannedTraining(
    prepare=with_pretrained_sizes,
    batch=batch_of,
    build_model=build_model,
    make_step=make_step,
    cost=cost_of,
    others=others,
)
