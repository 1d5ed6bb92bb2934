"""The compiled pieces of `complete`: prompts are read into rows, and continued."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxformer.decoding import (
    LogitsProcessor,
    SamplerInputs,
    SampleState,
    SamplingConfig,
    begin_sampling,
    put_rows,
    take_rows,
)
from jaxformer.nn.models import DecoderOnly
from jaxformer.ops.masks import AnyArray
from jaxformer.pipelines.batching import next_power_of_two
from jaxformer.pipelines.placement import divide_rows, placed

# A width is read where more tokens than this are left: about three quarters of it.
_WIDTHS = {1024: 768, 256: 192, 64: 48, 16: 0}
_EXACT_WIDTHS = (1024, 256, 64, 16, 4, 1)
# The most tokens of all texts in a part, after which an interrupt ends the call.
_PART_TOKENS = 2048


class NewTexts(NamedTuple):
    """K texts that enter rows: arrays [K, ...], but for the `seed` of all."""

    prompts: SamplerInputs
    context: Int[AnyArray, " K"]
    """The number of tokens before the last one that the model sees."""
    values: Mapping[str, AnyArray]
    """The settings of each text, as `row_values` gives them."""
    seed: Int[AnyArray, ""] | np.uint32


@partial(
    jax.jit,
    static_argnames=("model", "config", "eos", "logits_processors", "cache_length"),
    donate_argnames="state",
)
def read_prompts(
    model: DecoderOnly,
    params: Any,
    state: SampleState,
    rows: Int[AnyArray, " K"],
    new: NewTexts,
    tokens: Int[AnyArray, "K T"],
    start: Int[AnyArray, ""] | None,
    *,
    config: SamplingConfig,
    eos: tuple[int, ...],
    logits_processors: tuple[LogitsProcessor, ...],
    cache_length: int,
) -> SampleState:
    """`state` with `new` in `rows`, after the tokens of their contexts from `start` on are read.

    Called for one part of the contexts after the other; the tokens of earlier parts are kept.
    `start` is None for the first part, which begins with an empty cache; its place is known while
    tracing: flash attention reads it.
    """
    new, tokens = divide_rows((new, tokens), len(rows))
    variables = {"params": params}
    cache: Any
    if start is None:
        cache = model.apply(variables, len(rows), max_length=cache_length, method="init_cache")
        cache = cache.truncate(jnp.zeros(len(rows), jnp.int32))
    else:
        cache = take_rows(state.cache, rows)
    cache = divide_rows(cache, len(rows)).truncate(0 if start is None else start)
    if tokens.shape[1]:
        # Nothing uses these logits, so the compiler leaves them out.
        _, cache = model.apply(variables, tokens[:, None], cache, method="decode_step")
    begun = begin_sampling(
        cache.truncate(new.context),
        new.prompts,
        jax.random.key(new.seed),
        config,
        eos=eos,
        values=new.values,
        logits_processors=logits_processors,
    )
    return placed(put_rows(state, rows, begun))


# Traced once for calls of the same sizes: the shape of a state is asked for in each call.
@partial(
    jax.jit,
    static_argnames=("model", "rows", "config", "eos", "logits_processors", "cache_length"),
)
def begin_rows(
    model: DecoderOnly,
    params: Any,
    rows: int,
    config: SamplingConfig,
    eos: tuple[int, ...] = (),
    logits_processors: tuple[LogitsProcessor, ...] = (),
    *,
    cache_length: int,
) -> SampleState:
    """A state of `rows` texts of `config.max_new_tokens` tokens at most."""
    variables = {"params": params}
    cache: Any = model.apply(variables, rows, max_length=cache_length, method="init_cache")
    zeros = jnp.zeros(rows, jnp.int32)
    history = jnp.zeros((rows, config.max_new_tokens), jnp.int32)
    prompts = SamplerInputs(zeros, zeros, zeros, history, zeros)
    return begin_sampling(
        cache.truncate(zeros),
        prompts,
        jax.random.key(0),
        config,
        eos=eos,
        logits_processors=logits_processors,
    )


def text_size(length: int) -> int:
    """64, 96, 128, 192, 256, ...: the least of them that is at least `length`."""
    size = next_power_of_two(max(length, 64))
    return size * 3 // 4 if 64 < length <= size * 3 // 4 else size


def reading_plan(count: int, room: int, texts: int = 1) -> list[tuple[int, int]]:
    """(start, width) of the parts in which `count` tokens are read into `room` slots.

    So many `texts` are read together. The last part may be padded.

    >>> reading_plan(70, 128), reading_plan(20, 29)  # the last part begins where it fits
    ([(0, 64), (64, 16)], [(0, 16), (13, 16)])
    """
    most = min(room, _widest(texts))
    widths = {width: least for width, least in _WIDTHS.items() if width <= most} or {room: 0}
    plan: list[tuple[int, int]] = []
    start = 0
    while not plan or start < count:
        width = next((w for w, least in widths.items() if count - start > least), min(widths))
        plan.append((min(start, room - width), width))
        start += width
    return plan


def exact_reading_plan(count: int, texts: int = 1) -> list[tuple[int, int]]:
    """(start, width) of the parts in which `count` tokens are read without padding.

    >>> exact_reading_plan(21), exact_reading_plan(0)
    ([(0, 16), (16, 4), (20, 1)], [(0, 0)])
    """
    most = _widest(texts)
    plan: list[tuple[int, int]] = []
    start = 0
    while start < count:
        width = next(width for width in _EXACT_WIDTHS if width <= min(most, count - start))
        plan.append((start, width))
        start += width
    return plan or [(0, 0)]


def _widest(texts: int) -> int:
    """The widest part in which so many texts are read together."""
    return max(min(_WIDTHS), _PART_TOKENS // texts)
