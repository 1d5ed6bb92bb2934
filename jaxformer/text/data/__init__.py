"""Text files to batches of ids: read lines, keep ids on disk, give batch(step)."""

from jaxformer.text.data.batches import (
    Batches,
    MaskedBatch,
    PairBatch,
    RowSelection,
    StreamBatch,
    all_rows,
    fill_rows,
)
from jaxformer.text.data.encoding import encode_documents, encode_pairs
from jaxformer.text.data.id_files import JoinedIds, expand
from jaxformer.text.data.masking import MaskedStream
from jaxformer.text.data.mixture import Mixture
from jaxformer.text.data.pairs import Bucket, PairBatches, PairIds, bucket_pairs, plan_buckets
from jaxformer.text.data.streams import Stream, iterate_once
from jaxformer.text.data.text_files import (
    iterate_lines,
    iterate_tab_pairs,
    other_format,
    read_documents,
    read_lines,
    read_pairs,
)
from jaxformer.text.data.token_files import open_tokens, write_tokens
from jaxformer.text.data.tokens import Tokens

__all__ = [
    "Batches",
    "Bucket",
    "JoinedIds",
    "MaskedBatch",
    "MaskedStream",
    "Mixture",
    "PairBatch",
    "PairBatches",
    "PairIds",
    "RowSelection",
    "Stream",
    "StreamBatch",
    "Tokens",
    "all_rows",
    "bucket_pairs",
    "encode_documents",
    "encode_pairs",
    "expand",
    "fill_rows",
    "iterate_lines",
    "iterate_once",
    "iterate_tab_pairs",
    "open_tokens",
    "other_format",
    "plan_buckets",
    "read_documents",
    "read_lines",
    "read_pairs",
    "write_tokens",
]
