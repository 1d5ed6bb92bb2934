"""Beam search and sampling over a step function; nothing here knows a model.

A step is `step(tokens [B, W], cache) -> (logits [B, W, V], cache)` with W hypotheses per sentence;
the cache has a method `reorder_beams(parents [B, W]) -> cache`.
"""

from jaxformer.decoding.beam_search import (
    LengthPenalty,
    beam_search,
    gnmt_length_penalty,
    power_length_penalty,
)
from jaxformer.decoding.hypotheses import Hypotheses, Step
from jaxformer.decoding.logits_processors import (
    DecodeHistory,
    LogitsProcessor,
    force_token_at,
    make_processors,
    min_new_tokens,
    no_repeat_ngram,
    renormalize,
    repetition_penalty,
    suppress_tokens,
)
from jaxformer.decoding.queue import Queue
from jaxformer.decoding.sampling import Prompts, Sampler, StopFn, greedy, make_sampler, sample
from jaxformer.decoding.settings import (
    CompletionOptions,
    LogitsConfig,
    SamplerConfig,
    SamplingConfig,
    SearchConfig,
    TranslationOptions,
)

__all__ = [
    "CompletionOptions",
    "DecodeHistory",
    "Hypotheses",
    "LengthPenalty",
    "LogitsConfig",
    "LogitsProcessor",
    "Prompts",
    "Queue",
    "Sampler",
    "SamplerConfig",
    "SamplingConfig",
    "SearchConfig",
    "Step",
    "StopFn",
    "TranslationOptions",
    "beam_search",
    "force_token_at",
    "gnmt_length_penalty",
    "greedy",
    "make_processors",
    "make_sampler",
    "min_new_tokens",
    "no_repeat_ngram",
    "power_length_penalty",
    "renormalize",
    "repetition_penalty",
    "sample",
    "suppress_tokens",
]
