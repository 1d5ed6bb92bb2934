"""Beam search and sampling over a step function; nothing here knows a model.

A step is `step(tokens [B, W], cache) -> (logits [B, W, V], cache)` with W hypotheses per sentence;
the cache has a method `reorder_beams(parents [B, W]) -> cache`.
"""

from jaxformer.decoding.beam_search import BeamState, beam_more, beam_search, begin_beams
from jaxformer.decoding.hypotheses import Hypotheses
from jaxformer.decoding.logits_processors import (
    DecodeHistory,
    LogitsProcessor,
    force_token_at,
    no_repeat_ngram,
    renormalize,
    suppress_tokens,
)
from jaxformer.decoding.sampling import (
    SamplerInputs,
    SampleState,
    begin_sampling,
    sample,
    sample_more,
)
from jaxformer.decoding.settings import (
    CompletionOptions,
    LogitsConfig,
    SamplingConfig,
    SearchConfig,
    TranslationOptions,
)
from jaxformer.decoding.state import put_rows, row_values, take_rows, without_values
from jaxformer.decoding.step import Step

__all__ = [
    "BeamState",
    "CompletionOptions",
    "DecodeHistory",
    "Hypotheses",
    "LogitsConfig",
    "LogitsProcessor",
    "SamplerInputs",
    "SampleState",
    "SamplingConfig",
    "SearchConfig",
    "Step",
    "TranslationOptions",
    "beam_more",
    "beam_search",
    "begin_beams",
    "begin_sampling",
    "force_token_at",
    "no_repeat_ngram",
    "put_rows",
    "renormalize",
    "row_values",
    "sample",
    "sample_more",
    "suppress_tokens",
    "take_rows",
    "without_values",
]
