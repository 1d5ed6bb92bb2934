"""Tokenizers for other libraries: special tokens around each text, masks that take spaces."""

import copy
import json
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from jaxformer import optional_dependencies
from jaxformer.text.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

_WORDS = 64


def with_template(tokenizer: Tokenizer, *, bos: bool = False, eos: bool = False) -> Tokenizer:
    """A tokenizer that, in other programs, puts its BOS before and its EOS after each text.

    `encode` here gives the same ids as before. A role without a token is left out.
    """
    special = tokenizer.special
    first = [special.bos] if bos and special.bos is not None else []
    last = [special.eos] if eos and special.eos is not None else []
    names = {tokenizer.token(index): index for index in (*first, *last)}
    before, after = ([tokenizer.token(index) for index in side] for side in (first, last))
    library = optional_dependencies.load("tokenizers")
    changed = copy.deepcopy(tokenizer.library_tokenizer)
    if special.mask is not None:
        changed = _with_mask_spaces(tokenizer)
    changed.post_processor = library.processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, "$B:1", *(f"{name}:1" for name in after)],
        special_tokens=list(names.items()),
    )
    return Tokenizer(changed)


def mask_joins_spaces(words: Sequence[str], tokenizer: Tokenizer) -> tuple[bool, bool]:
    """Whether the space before a mask, and the one after it, is no token of its own.

    `words` show how the tokenizer treats spaces.
    """
    single, spaced, pairs = (
        tokenizer.encode_batch([form.format(word) for word in words])
        for form in ("{0}", " {0}", "{0} {0}")
    )
    # Both where tokens have no spaces; the one before where a token begins with its space.
    apart = all(pair == ids * 2 for pair, ids in zip(pairs, single, strict=True))
    joined = any(len(a) >= len(b) for a, b in zip(single, spaced, strict=True))
    return apart or joined, apart


def _with_mask_spaces(tokenizer: Tokenizer) -> "tokenizers.Tokenizer":
    """The library's tokenizer, whose mask takes the spaces around it as `fill_mask` does."""
    content = json.loads(tokenizer.library_tokenizer.to_str())
    texts = (tokenizer.decode([index]).strip() for index in range(tokenizer.vocab_size))
    words = list(islice((text for text in texts if text.isalpha()), _WORDS))
    before, after = mask_joins_spaces(words, tokenizer)
    for token in content["added_tokens"]:
        if token["id"] == tokenizer.special.mask:
            token |= {"lstrip": before, "rstrip": after}
    return optional_dependencies.load("tokenizers").Tokenizer.from_str(json.dumps(content))
