"""Search and sampling over a step function; nothing here knows a model.

A step is `step(tokens [B, W], cache) -> (logits [B, W, V], cache)`, W hypotheses a sentence;
the cache offers `cache.select(parents [B, W]) -> cache`.
"""

from jaxformer.decoding.beams import Penalty, Stop, beam_search, first_full, gnmt, no_better, power
from jaxformer.decoding.hypotheses import Hypotheses, Step
from jaxformer.decoding.picks import Pick, greedy, min_p, temperature, top_k, top_p, truncated
from jaxformer.decoding.rules import Rule, banned, repetition_penalty
from jaxformer.decoding.sampling import Watch, sample

__all__ = [
    "Hypotheses",
    "Penalty",
    "Pick",
    "Rule",
    "Step",
    "Stop",
    "Watch",
    "banned",
    "beam_search",
    "first_full",
    "gnmt",
    "greedy",
    "min_p",
    "no_better",
    "power",
    "repetition_penalty",
    "sample",
    "temperature",
    "top_k",
    "top_p",
    "truncated",
]
