"""Text in, text out."""

from jaxformer.pipelines.completion import Completion, complete, complete_with_details, stream
from jaxformer.pipelines.embeddings import TextEmbeddings, embed, embed_with_details
from jaxformer.pipelines.fill_mask import MaskPrediction, fill_mask, fill_mask_with_details
from jaxformer.pipelines.scoring import score, score_pairs, score_with_details
from jaxformer.pipelines.sentences import translate_ids
from jaxformer.pipelines.step_fn import make_step_fn
from jaxformer.pipelines.token_scores import TokenScores, score_continuations, score_tokens
from jaxformer.pipelines.translation import (
    Translation,
    encode_sources,
    find_too_long,
    max_target_length,
    translate,
    translate_with_details,
)

__all__ = [
    "Completion",
    "MaskPrediction",
    "TextEmbeddings",
    "TokenScores",
    "Translation",
    "complete",
    "complete_with_details",
    "embed",
    "embed_with_details",
    "encode_sources",
    "fill_mask",
    "fill_mask_with_details",
    "find_too_long",
    "make_step_fn",
    "max_target_length",
    "score",
    "score_continuations",
    "score_pairs",
    "score_tokens",
    "score_with_details",
    "stream",
    "translate",
    "translate_ids",
    "translate_with_details",
]
