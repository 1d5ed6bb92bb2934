"""Search and sampling over a step function; nothing here knows a model.

A step is `step(tokens [B, W], cache) -> (logits [B, W, V], cache)`, W hypotheses a sentence;
the cache offers `cache.select(parents [B, W]) -> cache`.
"""

from jaxformer.decoding.beams import (
    Limit,
    Outlook,
    Penalty,
    Stop,
    as_it_stands,
    at_best,
    at_the_limit,
    beam_search,
    ends_for_nothing,
    first_full,
    gnmt,
    is_cut,
    must_end,
    no_better,
    power,
)
from jaxformer.decoding.hypotheses import Hypotheses, Step
from jaxformer.decoding.picks import Pick, greedy, min_p, temperature, top_k, top_p, truncated
from jaxformer.decoding.rules import (
    Rule,
    Written,
    banned,
    forced,
    lasting,
    no_repeats,
    renormalized,
    repetition_penalty,
)
from jaxformer.decoding.sampling import Watch, sample

__all__ = [
    "Hypotheses",
    "Limit",
    "Outlook",
    "Penalty",
    "Pick",
    "Rule",
    "Step",
    "Stop",
    "Watch",
    "Written",
    "as_it_stands",
    "at_best",
    "at_the_limit",
    "banned",
    "beam_search",
    "ends_for_nothing",
    "first_full",
    "forced",
    "gnmt",
    "greedy",
    "is_cut",
    "lasting",
    "min_p",
    "must_end",
    "no_better",
    "no_repeats",
    "power",
    "renormalized",
    "repetition_penalty",
    "sample",
    "temperature",
    "top_k",
    "top_p",
    "truncated",
]
