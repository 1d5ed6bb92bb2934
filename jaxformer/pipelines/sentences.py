"""The compiled pieces of `translate`: sentences enter rows, and are searched."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxformer.decoding import (
    BeamState,
    Hypotheses,
    LogitsProcessor,
    SearchConfig,
    TranslationOptions,
    beam_search,
    begin_beams,
    put_rows,
)
from jaxformer.nn.models import EncoderDecoder
from jaxformer.ops.masks import AnyArray
from jaxformer.pipelines.decoding_weights import lay_out
from jaxformer.pipelines.placement import divide_rows, placed
from jaxformer.pipelines.step_fn import make_step_fn


@partial(jax.jit, static_argnames=("model", "search", "bos", "pad", "logits_processors"))
def translate_ids(
    model: EncoderDecoder,
    params: Any,
    source: Int[Array, "B S"],
    max_new_tokens: Int[Array, " B"],
    search: SearchConfig,
    *,
    bos: int = TranslationOptions.bos,
    pad: int = TranslationOptions.pad,
    logits_processors: tuple[LogitsProcessor, ...] = (),
) -> Hypotheses:
    """The `search.beam_size` best translations of each row of `source`, padded with `pad`.

    Translation b has at most `max_new_tokens[b]` tokens, and all at most `search.max_new_tokens`,
    which must be given. `logits_processors` are as in `beam_search`. A pure function: it can be
    jitted, vmapped (over an ensemble's `params`) and exported.
    """
    model, params = lay_out(model, params)
    cache = _encode(model, params, source, search, pad)
    start = jnp.full(source.shape[:1], bos, jnp.int32)
    return beam_search(
        make_step_fn(model, params),
        cache,
        start,
        max_new_tokens,
        search,
        logits_processors=logits_processors,
    )


@partial(
    jax.jit,
    static_argnames=("model", "search", "bos", "pad", "logits_processors"),
    donate_argnames="state",
)
def enter_sentences(
    model: EncoderDecoder,
    params: Any,
    state: BeamState,
    rows: Int[AnyArray, " K"],
    source: Int[AnyArray, "K S"],
    max_new_tokens: Int[AnyArray, " K"],
    values: Mapping[str, AnyArray],
    *,
    search: SearchConfig,
    bos: int,
    pad: int,
    logits_processors: tuple[LogitsProcessor, ...] = (),
) -> BeamState:
    """`state` with the sentences of `source` in `rows`."""
    texts = source, max_new_tokens, values
    source, max_new_tokens, values = divide_rows(texts, len(rows))
    begun = begin_sentences(
        model, params, source, max_new_tokens, values, search, bos, pad, logits_processors
    )
    return placed(put_rows(state, rows, begun))


# Traced once for calls of the same sizes: the shape of a state is asked for in each call.
@partial(
    jax.jit,
    static_argnames=("model", "search", "bos", "pad", "logits_processors"),
    inline=True,
)
def begin_sentences(
    model: EncoderDecoder,
    params: Any,
    source: Int[AnyArray, "K S"],
    max_new_tokens: Int[AnyArray, " K"],
    values: Mapping[str, AnyArray],
    search: SearchConfig,
    bos: int,
    pad: int,
    logits_processors: tuple[LogitsProcessor, ...] = (),
) -> BeamState:
    """The state before the first token of the translations of `source`."""
    cache = _encode(model, params, source, search, pad)
    cache = cache.truncate(jnp.zeros(len(source), jnp.int32))
    start = jnp.full(source.shape[:1], bos, jnp.int32)
    return begin_beams(
        cache, start, max_new_tokens, search, values=values, logits_processors=logits_processors
    )


def _encode(
    model: EncoderDecoder, params: Any, source: Int[AnyArray, "B S"], search: SearchConfig, pad: int
) -> Any:
    """The cache of a search in `source`."""
    return model.apply(
        {"params": params},
        source,
        source != pad,
        max_length=search.max_new_tokens,
        num_beams=search.beam_size,
        method="init_cache",
    )
