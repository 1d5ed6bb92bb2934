"""Text to ids and back: byte-pair encoding, words and characters, each kept in one JSON file.

All three are built with the `tokenizers` library and saved in its `tokenizer.json` format.
The four special tokens have the ids 0 to 3 and never come out of `encode`: text that looks like
one of them is ordinary text.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxformer import extras
from jaxformer.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
_BYTES = 256


class DataError(ValueError):
    """What a file or a text holds cannot be used."""


class Tokenizer:
    """Text to a list of ids and back, by one tokenizer of the `tokenizers` library.

    Raises `DataError` unless ids 0 to 3 are the special tokens `<pad> <bos> <eos> <unk>`.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer") -> None:
        _check_special_tokens(tokenizer)
        # Not kept in the file, and without it "<pad>" in a text would become id 0.
        tokenizer.encode_special_tokens = True
        # A file made elsewhere may carry these; they would cut or lengthen sentences in silence.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of ids, special tokens included."""
        return self._tokenizer.get_vocab_size()

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokenizer's JSON: equal for equal tokenizers."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without `<bos>` and `<eos>`; `DataError` for a lone surrogate."""
        return self.encode_batch([text])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """The ids of every line, as `encode` gives them."""
        lines = list(lines)
        try:
            encodings = self._tokenizer.encode_batch_fast(lines, add_special_tokens=False)
        except TypeError as error:
            number, line = next((i, x) for i, x in enumerate(lines, 1) if not _is_text(x))
            raise DataError(f"text {number} of {len(lines)}: {_why_not_text(line)}") from error
        return [encoding.ids for encoding in encodings]

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


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer saved in the file `path`.

    Raises `DataError` for a file that is absent, damaged, or without our special tokens.
    """
    library = extras.load("tokenizers")
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the tokenizer: {error}") from error
    try:
        tokenizer = library.Tokenizer.from_str(text)
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not a whole tokenizer.json: {error}") from error
    try:
        return Tokenizer(tokenizer)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def train_bpe(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with at most `vocab_size` ids, such that decode(encode(text)) == text.

    Every byte has an id, so no text is unknown. A sentence is read as if it began with a space,
    so that its first word is the same token as elsewhere; decoding takes that space off. Merges
    stop early where the text has no pair left. `ConfigError` for less than 260 ids (256 bytes
    and 4 special tokens), `DataError` when there is no text. Sennrich et al. 2016; bytes as in
    GPT-2 (Radford et al. 2019).
    """
    _check_size(vocab_size, _BYTES + len(SPECIAL_TOKENS), "256 bytes and 4 special tokens")
    library = extras.load("tokenizers")
    pieces = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.normalizer = library.normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pieces(add_prefix_space=False)
    tokenizer.decoder = _join(library, library.decoders.ByteLevel())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pieces.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some_text(lines), trainer)
    return Tokenizer(tokenizer)


def train_words(lines: Iterable[str], vocab_size: int) -> Tokenizer:
    """A word-level tokenizer: the most frequent words of `lines`, at most `vocab_size` ids.

    A word is what stands between white space; punctuation is not split off. Lost: which white
    space it was (words are joined by one space) and words outside the vocabulary (`<unk>`,
    decoded to nothing). `ConfigError` for less than 5 ids, `DataError` when there is no text.
    """
    _check_size(vocab_size, len(SPECIAL_TOKENS) + 1, "4 special tokens and a word")
    library = extras.load("tokenizers")
    normal = library.normalizers
    tokenizer = library.Tokenizer(library.models.WordLevel(unk_token=SPECIAL_TOKENS[UNK]))
    # The space stays in front of its word, so the word "<pad>" is not the token "<pad>".
    tokenizer.normalizer = normal.Sequence(
        [normal.Replace(library.Regex(r"\s+"), " "), normal.Strip(), normal.Prepend(" ")]
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = _join(library, library.decoders.Fuse())
    trainer = library.trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False
    )
    tokenizer.train_from_iterator(_some_text(lines), trainer)
    return Tokenizer(tokenizer)


def train_characters(lines: Iterable[str]) -> Tokenizer:
    """One id for every Unicode character of `lines`, in order of code point.

    Text of these characters is decoded exactly; any other is `<unk>`, decoded to nothing.
    `DataError` when there is no text.
    """
    library = extras.load("tokenizers")
    characters = sorted(set().union(*_some_text(lines)))
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *characters))}
    # A BPE without merges is a table of characters.
    model = library.models.BPE(
        vocab=vocabulary, merges=[], unk_token=SPECIAL_TOKENS[UNK], fuse_unk=False
    )
    tokenizer = library.Tokenizer(model)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.decoder = library.decoders.Fuse()
    return Tokenizer(tokenizer)


def _join(library, pieces) -> "tokenizers.decoders.Decoder":
    """Decodes by `pieces`, then takes off the one space that was put before the sentence."""
    return library.decoders.Sequence([pieces, library.decoders.Strip(" ", 1, 0)])


def _some_text(lines: Iterable[str]) -> Iterator[str]:
    empty = True
    for number, line in enumerate(lines, start=1):
        if not _is_text(line):
            raise DataError(f"line {number} of the training text: {_why_not_text(line)}")
        empty = empty and not line.strip()
        yield line
    if empty:
        raise DataError("a tokenizer needs text to learn from; all lines given were blank")


def _check_size(vocab_size: int, least: int, reason: str) -> None:
    if vocab_size < least:
        raise ConfigError(f"vocab_size must be at least {least} ({reason}), got {vocab_size}")


def _check_special_tokens(tokenizer: "tokenizers.Tokenizer") -> None:
    added = tokenizer.get_added_tokens_decoder()
    found = tuple(added[i].content if i in added else None for i in range(len(SPECIAL_TOKENS)))
    if found != SPECIAL_TOKENS or not all(added[i].special for i in range(len(found))):
        raise DataError(
            f"ids 0 to 3 must be the special tokens {' '.join(SPECIAL_TOKENS)}, got {found}: "
            "train it with train_bpe, train_words or train_characters"
        )


def _is_text(line: object) -> bool:
    return isinstance(line, str) and not re.search("[\ud800-\udfff]", line)


def _why_not_text(line: object) -> str:
    if not isinstance(line, str):
        return f"a text must be str, got {type(line).__name__}"
    return f"a lone surrogate is no character; read the text as UTF-8: {line[:60]!r}"
