"""Text without JAX: tokenizers, data sets and metrics."""

from jaxformer.text import data, metrics, tokenizers

__all__ = ["data", "metrics", "tokenizers"]
