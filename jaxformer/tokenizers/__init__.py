"""Text to ids and back: byte-pair encoding, words and characters, trained here or made elsewhere.

All are tokenizers of the `tokenizers` library, saved in its `tokenizer.json` format. What is
trained here has its special tokens first, in the order given; what others made has them where
they are, found by their names. Special tokens never come out of `encode`, but for the one that
stands for the unknown: text that looks like one of them is ordinary text.
"""

from jaxformer.tokenizers.files import FILES, load, load_own, load_target
from jaxformer.tokenizers.special import (
    BOS,
    EOS,
    MASKED_SPECIAL_TOKENS,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    Special,
)
from jaxformer.tokenizers.tokenizer import DataError, Tokenizer, require_own
from jaxformer.tokenizers.training import train_bpe, train_characters, train_words

__all__ = [
    "BOS",
    "EOS",
    "FILES",
    "MASKED_SPECIAL_TOKENS",
    "PAD",
    "SPECIAL_TOKENS",
    "UNK",
    "DataError",
    "Special",
    "Tokenizer",
    "load",
    "load_own",
    "load_target",
    "require_own",
    "train_bpe",
    "train_characters",
    "train_words",
]
