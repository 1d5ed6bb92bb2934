"""Text files to batches of ids: read lines, keep ids on disk, give batch(step)."""

from jaxformer.data.pairs import Bucket, PairBatch, PairBatches, bucket_pairs, plan_buckets
from jaxformer.data.reading import DataError, read_lines, read_pairs, read_tab_pairs
from jaxformer.data.tokens import Tokens, encode_lines, encode_pairs, open_tokens, write_tokens

__all__ = [
    "Bucket",
    "DataError",
    "PairBatch",
    "PairBatches",
    "Tokens",
    "bucket_pairs",
    "encode_lines",
    "encode_pairs",
    "open_tokens",
    "plan_buckets",
    "read_lines",
    "read_pairs",
    "read_tab_pairs",
    "write_tokens",
]
