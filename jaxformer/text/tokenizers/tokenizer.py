"""Text to ids and back, and the special tokens: their roles and their names in vocabularies."""

import copy
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.storage import replacing

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
    "bos": ("<bos>", "[CLS]", "<|endoftext|>", "<s>", "<|begin_of_text|>"),
    "eos": ("<eos>", "[SEP]", "<|endoftext|>", "</s>", "<|end_of_text|>"),
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


class Tokenizer:
    """Converts text to a list of ids and back, with a tokenizer of the `tokenizers` library.

    Attributes: `special`, the ids of the special tokens; `vocab_size`, the highest id plus one.

    >>> tokenizer = jf.train_bpe(["a rose is a rose"], 264)
    >>> ids = tokenizer.encode("a rose")
    >>> [tokenizer.token(index) for index in ids], tokenizer.decode(ids)
    (['Ġa', 'Ġros', 'e'], 'a rose')
    >>> tokenizer.vocab_size, tokenizer.special.eos
    (264, 2)
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        tokenizer = copy.deepcopy(tokenizer)
        # Without this "<pad>" in a text would become id 0; tokenizer.json does not store it.
        tokenizer.encode_special_tokens = True
        # Truncation and padding may be stored in a file made elsewhere.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special: SpecialTokens = find_special_tokens(tokenizer)
        self.vocab_size: int = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._special_from_text: set[int] = set()
        self._vocabulary_only: dict[str, int] = {}
        if isinstance(tokenizer.model, optional_dependencies.load("tokenizers").models.Unigram):
            # "</s>" is a piece like any other of T5's, so that name would end a text.
            self._special_from_text = {*all_special_ids(tokenizer).values()} - {self.special.unk}
            # `read_sentencepiece` puts a space in front of pieces that its model does not have.
            vocabulary = tokenizer.get_vocab().items()
            self._vocabulary_only = {x[1:]: i for x, i in vocabulary if x.startswith(" ")}

    @property
    def library_tokenizer(self) -> "tokenizers.Tokenizer":
        """The tokenizer of the `tokenizers` library; do not change it."""
        return self._tokenizer

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokenizer's JSON: equal for equal tokenizers."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def check_fits(self, vocab_size: int) -> None:
        """Raises `ConfigError` for ids outside the `vocab_size` ids of a model."""
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.vocab_size} ids, but the model has only {vocab_size}: "
                "give the tokenizer that the model was trained with"
            )

    def token(self, index: int) -> str:
        """The token with the id `index`, as in the vocabulary; `DataError` if there is none."""
        token = self._tokenizer.id_to_token(index) if 0 <= index < self.vocab_size else None
        if token is None:
            raise DataError(f"no token has the id {index}, ids are 0 to {self.vocab_size - 1}")
        return token

    def id_of(self, token: str) -> int | None:
        """The id of a token, written as in the vocabulary, or None."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens except the unknown token.

        Raises `DataError` for a lone surrogate, and for a character without a token when the
        vocabulary has no unknown token.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of every line; see `encode`."""
        if isinstance(lines, str | bytes):
            raise DataError("the texts are one string: for one text use encode, or give a list")
        lines = list(lines)
        try:
            rows = self._ids(lines)
            if self._special_from_text:
                rows = [[i for index in row for i in self._spell_out(index)] for row in rows]
        except TypeError as error:
            number, line = next((i, x) for i, x in enumerate(lines, 1) if not is_text(x))
            raise DataError(f"text {number} of {len(lines)}: {why_not_text(line)}") from error
        except Exception as error:  # the library has no narrower class
            raise DataError(f"the tokenizer cannot read this text: {error}") from error
        return rows

    def encode_with_special(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The ids of each text, in which the name of a special token is that token.

        With them start and end in the text of what each id stands for. For text that a program has
        written, such as a chat template; `encode` takes all names for text.
        """
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.encode_special_tokens = False
        encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; `DataError` for an id without a token."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Iterable[Sequence[int]]) -> list[str]:
        """The text of every list of ids; see `decode`."""
        rows, size = [np.asarray(ids) for ids in batch], self.vocab_size
        for row in rows:
            if row.size and (row.ndim != 1 or row.dtype.kind not in "iu"):
                raise DataError(f"ids must be a sequence of integers, got {shorten(repr(row))}")
            if row.size and not 0 <= row.min() <= row.max() < size:
                raise DataError(
                    f"ids must be 0 to {size - 1}, got {row.min()} to {row.max()}: "
                    "decode with the tokenizer that made the ids"
                )
        plain = [[int(i) for i in row] for row in rows]
        return self._tokenizer.decode_batch(plain, skip_special_tokens=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tokenizer to the file `path` as JSON, completely or not at all."""
        with replacing(path) as unfinished:
            unfinished.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")

    def _ids(self, lines: list[str]) -> list[list[int]]:
        """The ids of every line; pieces that only the vocabulary has are not unknown."""
        if not self._vocabulary_only:
            encodings = self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        encodings = self._tokenizer.encode_batch(lines, add_special_tokens=False)
        return [
            [
                self._vocabulary_only.get(piece, index) if index == self.special.unk else index
                for index, piece in zip(encoding.ids, encoding.tokens, strict=True)
            ]
            for encoding in encodings
        ]

    def _spell_out(self, index: int) -> list[int]:
        """The id itself, or for a special token the ids of the characters of its name."""
        if index not in self._special_from_text:
            return [index]
        model = self._tokenizer.model
        return [piece.id for x in self.token(index) for piece in model.tokenize(x)]


def require_standard_ids(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` itself; `DataError` unless its special ids are `PAD`, `BOS`, `EOS` and `UNK`."""
    if tokenizer.special[: len(SPECIAL_TOKENS)] != (PAD, BOS, EOS, UNK):
        raise DataError(
            f"ids 0 to 3 must be the special tokens {' '.join(SPECIAL_TOKENS)}, got "
            f"{tokenizer.special}: train it with train_bpe, train_words or train_characters"
        )
    return tokenizer


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


def is_text(line: Any) -> bool:
    """Whether `line` is a string without lone surrogates."""
    return isinstance(line, str) and not re.search("[\ud800-\udfff]", line)


def why_not_text(line: Any) -> str:
    """The reason why `line` is not text."""
    if not isinstance(line, str):
        return f"a text must be str, got {type(line).__name__}"
    return f"a lone surrogate is no character; read the text as UTF-8: {shorten(line)!r}"
