"""Text to ids and back by one tokenizer."""

import contextlib
import copy
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxformer import extras
from jaxformer.tokenizers.special import (
    BOS,
    EOS,
    PAD,
    SPACE,
    SPECIAL_TOKENS,
    UNK,
    special_ids,
    special_of,
)

if TYPE_CHECKING:
    import tokenizers


class DataError(ValueError):
    """What a file or a text holds cannot be used."""


class Tokenizer:
    """Text to a list of ids and back, by a copy of any tokenizer of the `tokenizers` library.

    `special` has the ids of its special tokens, `vocab_size` is one more than its highest id.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        tokenizer = copy.deepcopy(tokenizer)
        # Not kept in the file, and without it "<pad>" in a text would become id 0.
        tokenizer.encode_special_tokens = True
        # A file made elsewhere may carry these; they would cut or lengthen texts in silence.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.special = special_of(tokenizer)
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._symbols = _symbols(tokenizer)
        self._mistaken = _mistaken(tokenizer, self.special.unk)
        self._foreign = _foreign(tokenizer)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokenizer's JSON: equal for equal tokenizers."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def token(self, index: int) -> str:
        """The token with the id `index` as the vocabulary writes it; `DataError` if none has it."""
        token = self._tokenizer.id_to_token(index) if 0 <= index < self.vocab_size else None
        if token is None:
            raise DataError(f"no token has the id {index}, ids are 0 to {self.vocab_size - 1}")
        return token

    def id_of(self, token: str) -> int | None:
        """The id of a token written as the vocabulary writes it, None if it has no such token."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with no special token around it or in it but the unknown.

        Raises `DataError` for a lone surrogate, and for a character that the vocabulary has no
        token for when it has none for the unknown either.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of every line, as `encode` gives them."""
        lines = list(lines)
        try:
            rows = self._ids(lines)
            if self._mistaken:
                rows = [[i for index in row for i in self._ordinary(index)] for row in rows]
        except TypeError as error:
            number, line = next((i, x) for i, x in enumerate(lines, 1) if not is_text(x))
            raise DataError(f"text {number} of {len(lines)}: {why_not_text(line)}") from error
        except Exception as error:  # the library has no narrower class
            raise DataError(f"the tokenizer cannot read this text: {error}") from error
        if self._symbols is not None:
            self._require_known(lines)
        return rows

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens give nothing, ids of no token a `DataError`."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Iterable[Sequence[int]]) -> list[str]:
        """The text of every list of ids, as `decode` gives it."""
        rows = [[int(i) for i in ids] for ids in batch]
        size = self.vocab_size
        for row in rows:
            if row and not 0 <= min(row) <= max(row) < size:
                raise DataError(
                    f"ids must be 0 to {size - 1}, got {min(row)} to {max(row)}: "
                    "this is not the tokenizer that the ids were made with"
                )
        return self._tokenizer.decode_batch(rows, skip_special_tokens=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tokenizer to the file `path` as JSON, whole or not at all."""
        path = Path(path)
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        os.replace(unfinished, path)

    def _ids(self, lines: list[str]) -> list[list[int]]:
        """The ids of every line; the unknown that is a foreign piece is known by it."""
        if not self._foreign:
            encodings = self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        encodings = self._tokenizer.encode_batch(lines, add_special_tokens=False)
        return [
            [self._known(*piece, line) for piece in zip(x.ids, x.tokens, x.offsets, strict=True)]
            for x, line in zip(encodings, lines, strict=True)
        ]

    def _known(self, index: int, piece: str, place: tuple[int, int], line: str) -> int:
        if index != self.special.unk:
            return index
        if piece == self.token(index):  # a BPE does not say what was unknown
            piece = self._tokenizer.normalizer.normalize_str(line[slice(*place)]).lstrip(SPACE)
        return self._foreign.get(piece, index)

    def _ordinary(self, index: int) -> list[int]:
        """The id itself, or in place of a special one the ids of the characters of its name."""
        if index not in self._mistaken:
            return [index]
        model = self._tokenizer.model
        return [piece.id for x in self.token(index) for piece in model.tokenize(x)]

    def _require_known(self, lines: list[str]) -> None:
        for number, line in enumerate(lines, start=1):
            if _seen(self._tokenizer, line) <= self._symbols:
                continue
            unknown = [x for x in line if not _seen(self._tokenizer, x) <= self._symbols]
            raise DataError(
                f"text {number} of {len(lines)}: the vocabulary has no token for "
                f"{unknown[0] if unknown else line[:60]!r} and none for the unknown"
            )


def require_own(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` itself; `DataError` unless `PAD`, `BOS`, `EOS` and `UNK` are its special ids."""
    found = tokenizer.special[: len(SPECIAL_TOKENS)]
    if found != (PAD, BOS, EOS, UNK):
        raise DataError(
            f"ids 0 to 3 must be the special tokens {' '.join(SPECIAL_TOKENS)}, got "
            f"{tokenizer.special}: train it with train_bpe, train_words or train_characters"
        )
    return tokenizer


def is_text(line: object) -> bool:
    """Whether `line` is a string of characters, none of them half of a surrogate pair."""
    return isinstance(line, str) and not re.search("[\ud800-\udfff]", line)


def why_not_text(line: object) -> str:
    """What is wrong with a line that is not text."""
    if not isinstance(line, str):
        return f"a text must be str, got {type(line).__name__}"
    return f"a lone surrogate is no character; read the text as UTF-8: {line[:60]!r}"


def _seen(tokenizer: "tokenizers.Tokenizer", text: str) -> set[str]:
    """The characters of `text` as the model is given them, such as "Ġ" for a space."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return set(text)
    return set().union(*(piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)))


def _symbols(tokenizer: "tokenizers.Tokenizer") -> frozenset[str] | None:
    """The characters with a token, where others would be lost; None where none can be.

    A BPE without a token for the unknown leaves out what it does not know, and says nothing.
    """
    library = extras.load("tokenizers")
    model = tokenizer.model
    if not isinstance(model, library.models.BPE) or model.byte_fallback or model.unk_token:
        return None
    symbols = frozenset(token for token in tokenizer.get_vocab() if len(token) == 1)
    alphabet = frozenset(library.pre_tokenizers.ByteLevel.alphabet())
    # A character far outside that alphabet tells whether texts are cut into bytes.
    whole = alphabet <= symbols and _seen(tokenizer, "字") <= alphabet
    return None if whole else symbols


def _foreign(tokenizer: "tokenizers.Tokenizer") -> dict[str, int]:
    """The pieces that only another language is cut into, by how they are written there.

    A model of SentencePiece has them with a space before, as `read_pieces` makes it.
    """
    kinds = extras.load("tokenizers").models
    if tokenizer.normalizer is None or not isinstance(tokenizer.model, kinds.Unigram | kinds.BPE):
        return {}
    return {x[1:]: i for x, i in tokenizer.get_vocab().items() if x.startswith(" ")}


def _mistaken(tokenizer: "tokenizers.Tokenizer", unknown: int | None) -> set[int]:
    """The special ids that come out of a text all the same.

    A Unigram vocabulary knows "</s>" as a piece like any other, so T5's would end the text there.
    """
    found = set()
    for name, index in special_ids(tokenizer).items():
        # What has neither the name's pieces nor a token for the unknown raises.
        with contextlib.suppress(Exception):
            ids = tokenizer.encode(name, add_special_tokens=False).ids
            found.update({index}.intersection(ids) - {unknown})
    return found
