"""Strings in, strings out."""

from jaxformer.generation.completion import Completion, SamplingConfig, complete, stream
from jaxformer.generation.concurrency import concurrency, concurrently
from jaxformer.generation.manner import OWN, Manner, manner_of
from jaxformer.generation.step import step_function
from jaxformer.generation.translation import (
    BeamConfig,
    Translation,
    decode,
    encode_sources,
    room,
    score_pairs,
    too_long,
    translate,
)
from jaxformer.generation.understanding import (
    Candidate,
    Embedded,
    embed,
    fill_mask,
    likelihood,
)

__all__ = [
    "OWN",
    "BeamConfig",
    "Candidate",
    "Completion",
    "Embedded",
    "Manner",
    "SamplingConfig",
    "Translation",
    "complete",
    "concurrency",
    "concurrently",
    "decode",
    "embed",
    "encode_sources",
    "fill_mask",
    "likelihood",
    "manner_of",
    "room",
    "score_pairs",
    "step_function",
    "stream",
    "too_long",
    "translate",
]
