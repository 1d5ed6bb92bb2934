"""Tokenizers have no more ids than their model."""

from pathlib import Path

from jaxformer.config import TransformerConfig
from jaxformer.errors import ConfigError
from jaxformer.text.tokenizers import Tokenizer


def check_vocabularies(
    folder: Path, source: Tokenizer | None, target: Tokenizer | None, sizes: TransformerConfig
) -> None:
    """Raises `ConfigError`, naming the `folder`, for a tokenizer with more ids than the model."""
    try:
        if source is not None:
            source.check_fits(sizes.source_vocab_size or sizes.vocab_size)
        if target is not None:
            target.check_fits(sizes.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error
