"""Special tokens: their roles, their names in different vocabularies, how they are written."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tokenizers

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
MASKED_SPECIAL_TOKENS = (*SPECIAL_TOKENS, "<mask>")

SPACE = "▁"
"""The character that SentencePiece writes for a space."""

# Byte-level BPE and WordPiece separate a word from the brackets around it, so that no text gives
# a token that is written like this.
SPECIAL_TOKEN = re.compile(r"<[^\s<>]*[^\W_][^\s<>]*>|\[\w*[^\W_]\w*\]")


class SpecialTokens(NamedTuple):
    """The ids of a vocabulary's special tokens; None where it has no token for a role."""

    pad: int | None = None
    """Fills rows up."""
    bos: int | None = None
    """Begins a text."""
    eos: int | None = None
    """Ends a text."""
    unk: int | None = None
    """Stands for text without a token."""
    mask: int | None = None
    """Stands for a token to predict."""


# The names of each role in our vocabularies, BERT's, GPT-2's and SentencePiece's, in this order.
ROLE_NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]"),
    "bos": ("<bos>", "[CLS]", "<|endoftext|>", "<s>"),
    "eos": ("<eos>", "[SEP]", "<|endoftext|>", "</s>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}


def find_role(role: str, tokens: Iterable[str]) -> str | None:
    """The one of `tokens` with the role `role`, or None."""
    tokens = set(tokens)
    return next((name for name in ROLE_NAMES[role] if name in tokens), None)


def all_special_ids(tokenizer: "tokenizers.Tokenizer") -> dict[str, int]:
    """The ids of all special tokens of the tokenizer by name, with a role or without."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.special}


def find_special_tokens(tokenizer: "tokenizers.Tokenizer") -> SpecialTokens:
    """The ids of the special tokens that have a role."""
    ids = all_special_ids(tokenizer)
    return SpecialTokens(*(ids.get(find_role(role, ids) or "") for role in SpecialTokens._fields))
