"""Text in, text out."""

from jaxformer.pipelines.batching import make_step_fn
from jaxformer.pipelines.completion import Completion, complete, stream
from jaxformer.pipelines.embeddings import TextEmbeddings, embed
from jaxformer.pipelines.fill_mask import MaskPrediction, fill_mask
from jaxformer.pipelines.scoring import score, score_pairs
from jaxformer.pipelines.sentences import translate_ids
from jaxformer.pipelines.translation import (
    Translation,
    encode_sources,
    find_too_long,
    max_target_length,
    translate,
)

__all__ = [
    "Completion",
    "MaskPrediction",
    "TextEmbeddings",
    "Translation",
    "complete",
    "embed",
    "encode_sources",
    "fill_mask",
    "find_too_long",
    "make_step_fn",
    "max_target_length",
    "score",
    "score_pairs",
    "stream",
    "translate",
    "translate_ids",
]
