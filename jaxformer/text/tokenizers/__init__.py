"""Text to ids and back: byte-pair encoding, words and characters, trained here or made elsewhere.

All are tokenizers of the `tokenizers` library, saved in its `tokenizer.json` format. A tokenizer
trained here has its special tokens first, in the order given; of one made elsewhere its folder says
them, or else their names. `encode` gives no special token except `<unk>`: text that looks like a
special token is ordinary text. `encode_inputs` gives what a model reads: the ids of the folder's
own tokenizer.
"""

from jaxformer.text.tokenizers.languages import Languages, Template
from jaxformer.text.tokenizers.load_tokenizer import (
    digest,
    has_tokenizer,
    load,
    load_pair,
)
from jaxformer.text.tokenizers.tokenizer import (
    BOS,
    EOS,
    MASKED_SPECIAL_TOKENS,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    SpecialTokens,
    Tokenizer,
    check_list,
    require_standard_ids,
)
from jaxformer.text.tokenizers.train_tokenizer import train_bpe, train_characters, train_words

__all__ = [
    "BOS",
    "EOS",
    "Languages",
    "MASKED_SPECIAL_TOKENS",
    "PAD",
    "SPECIAL_TOKENS",
    "UNK",
    "SpecialTokens",
    "Template",
    "Tokenizer",
    "check_list",
    "digest",
    "has_tokenizer",
    "load",
    "load_pair",
    "require_standard_ids",
    "train_bpe",
    "train_characters",
    "train_words",
]
