"""The compiled program of `complete`: prompts in, the ids that follow them out."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from jaxformer.decoding import (
    Hypotheses,
    Prompts,
    Queue,
    SamplingConfig,
    min_new_tokens,
    sample,
    suppress_tokens,
)
from jaxformer.nn.models import DecoderOnly
from jaxformer.ops.masks import AnyArray
from jaxformer.pipelines.batching import make_step_fn, unstacked
from jaxformer.pipelines.streaming import report_tokens


class Round(NamedTuple):
    """The inputs of a compiled program that continues B texts."""

    tokens: Int[AnyArray, "B P"]  # padded at their beginnings
    left_padding: Int[AnyArray, " B"]
    prompts: Prompts
    rng: Key[Array, ""]
    callback: Int[Array, ""] | np.integer | None  # its number, if the program reports its tokens


@partial(jax.jit, static_argnames=("model", "config", "eos", "length", "known", "chunk", "rows"))
def continue_ids(
    model: DecoderOnly,
    params: Any,
    inputs: Round,
    *,
    config: SamplingConfig,
    eos: tuple[int, ...],
    length: int,
    known: int,
    chunk: int | None = None,
    rows: int | None = None,
) -> Hypotheses:
    """Continues each prompt by at most `length` of the first `known` tokens.

    The prompts are read `chunk` tokens at a time (None: all at once). With `rows` fewer than B, so
    many are continued together: when some end, the next take their rows (`Queue`), up to the first
    with `max_new_tokens` 0.
    """
    model, params = unstacked(model, params)
    apply: Callable[..., Any] = partial(model.apply, {"params": params})

    def begin(tokens: Int[AnyArray, "B P"], left_padding: Int[AnyArray, " B"]) -> Any:
        batch, size = tokens.shape
        most = size - 1 + length
        cache = apply(batch, max_length=most, left_padding=left_padding, method="init_cache")
        for start in range(0, size - 1, chunk or size):
            part = tokens[:, None, :-1][..., start : start + (chunk or size)]
            # Nothing uses these logits, so the compiler leaves them out.
            _, cache = apply(part, cache, method="decode_step")
        return cache

    texts = inputs.tokens, inputs.left_padding
    cache: Any = begin(*texts) if rows is None else None
    if rows is not None:
        count = (inputs.prompts.max_new_tokens > 0).sum()
        cache = Queue(lambda numbers: begin(*(x[numbers] for x in texts)), count, rows)
    unknown, callback = range(known, model.config.vocab_size), inputs.callback
    processors = [suppress_tokens([*unknown, *config.suppress_tokens])] if unknown else []
    if config.min_new_tokens and eos:  # counted over all rounds
        processors.append(min_new_tokens(config.min_new_tokens, eos))
    return sample(
        make_step_fn(model, params),
        cache,
        inputs.prompts,
        inputs.rng,
        replace(config, max_new_tokens=length, min_new_tokens=0),
        eos=eos,
        logits_processors=processors,
        stop_fn=None if callback is None else partial(report_tokens, callback),
    )
