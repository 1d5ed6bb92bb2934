"""Special tokens: what they are for, by what names they go, how they are written."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import tokenizers

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
MASKED_SPECIAL_TOKENS = (*SPECIAL_TOKENS, "<mask>")

SPACE = "▁"
"""How SentencePiece writes a space."""

# Byte-level BPE and WordPiece cut a word from the brackets around it, so in a text they never
# make a token that is written like this.
BRACKETS = re.compile(r"<[^\s<>]*[^\W_][^\s<>]*>|\[\w*[^\W_]\w*\]")


class Special(NamedTuple):
    """The ids of a vocabulary's special tokens; None where it has no token for a role."""

    pad: int | None = None
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    mask: int | None = None


# The names of each role: ours, BERT's, GPT-2's, SentencePiece's. The first that is there counts.
NAMES = {
    "pad": ("<pad>", "[PAD]"),
    "bos": ("<bos>", "[CLS]", "<|endoftext|>", "<s>"),
    "eos": ("<eos>", "[SEP]", "<|endoftext|>", "</s>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}


def name_of(role: str, tokens: Iterable[str]) -> str | None:
    """The one of `tokens` that has the role, None if none has it."""
    tokens = set(tokens)
    return next((name for name in NAMES[role] if name in tokens), None)


def special_ids(tokenizer: "tokenizers.Tokenizer") -> dict[str, int]:
    """Every special token of the tokenizer with its id, whether it has a role here or not."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.special}


def special_of(tokenizer: "tokenizers.Tokenizer") -> Special:
    """The ids of the special tokens that have a role."""
    ids = special_ids(tokenizer)
    return Special(*(ids.get(name_of(role, ids)) for role in Special._fields))
