"""Text files to batches of ids: read lines, keep ids on disk, give batch(step)."""

from jaxformer.data.documents import encode_documents, read_documents
from jaxformer.data.masking import MaskedBatch, MaskedStream, cover_masked
from jaxformer.data.order import Rows
from jaxformer.data.pairs import Bucket, PairBatch, PairBatches, bucket_pairs, plan_buckets
from jaxformer.data.reading import DataError, read_lines, read_pairs, read_tab_pairs
from jaxformer.data.streams import Stream, StreamBatch, cover
from jaxformer.data.tokens import Tokens, encode_lines, encode_pairs, open_tokens, write_tokens

__all__ = [
    "Bucket",
    "DataError",
    "MaskedBatch",
    "MaskedStream",
    "PairBatch",
    "PairBatches",
    "Rows",
    "Stream",
    "StreamBatch",
    "Tokens",
    "bucket_pairs",
    "cover",
    "cover_masked",
    "encode_documents",
    "encode_lines",
    "encode_pairs",
    "open_tokens",
    "plan_buckets",
    "read_documents",
    "read_lines",
    "read_pairs",
    "read_tab_pairs",
    "write_tokens",
]
