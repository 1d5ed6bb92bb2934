"""Vocabularies learned from text: byte-level BPE, words, characters."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from jaxformer import extras
from jaxformer.config import ConfigError
from jaxformer.tokenizers.special import BRACKETS, SPECIAL_TOKENS, name_of
from jaxformer.tokenizers.tokenizer import DataError, Tokenizer, is_text, why_not_text

if TYPE_CHECKING:
    import tokenizers

_BYTES = 256


def train_bpe(
    lines: Iterable[str],
    vocab_size: int,
    *,
    prefix: Literal["", " "] = " ",
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
) -> Tokenizer:
    """A byte-level BPE with at most `vocab_size` ids, such that decode(encode(text)) == text.

    Every byte has an id, so no text is unknown. With the prefix " " a text is read as if it began
    with a space, so that a sentence's first word is the same token as elsewhere; decoding takes
    that space off. With "" it is read as it stands, so that a text has the ids of the pieces
    that it is cut into at single line feeds between words. Merges stop early where the text has
    no pair left. `ConfigError` for fewer ids than 256 bytes and the special tokens, `DataError`
    when there is no text. Sennrich et al. 2016; bytes as in GPT-2 (Radford et al. 2019).
    """
    _check_special_tokens(special_tokens)
    _check_size(vocab_size, _BYTES, "256 bytes", special_tokens)
    if prefix not in ("", " "):
        raise ConfigError(f'prefix must be "" or " ", got {prefix!r}')
    library = extras.load("tokenizers")
    pieces = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = pieces(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    if prefix:
        tokenizer.normalizer = library.normalizers.Prepend(prefix)
        tokenizer.decoder = _join(library, tokenizer.decoder)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pieces.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some_text(lines), trainer)
    return Tokenizer(tokenizer)


def train_words(
    lines: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """A word-level tokenizer: the most frequent words of `lines`, at most `vocab_size` ids.

    A word is what stands between white space; punctuation is not split off. Lost: which white
    space it was (words are joined by one space) and words outside the vocabulary (`<unk>`,
    decoded to nothing). `ConfigError` for special tokens without `<unk>` and for fewer ids than
    they and one word, `DataError` when there is no text.
    """
    _check_special_tokens(special_tokens)
    _check_size(vocab_size, 1, "a word", special_tokens)
    unknown = name_of("unk", special_tokens)
    if unknown is None:
        raise ConfigError(f"words need <unk> among the special tokens, got {special_tokens}")
    library = extras.load("tokenizers")
    normal = library.normalizers
    tokenizer = library.Tokenizer(library.models.WordLevel(unk_token=unknown))
    # The space stays in front of its word, so the word "<pad>" is not the token "<pad>".
    tokenizer.normalizer = normal.Sequence(
        [normal.Replace(library.Regex(r"\s+"), " "), normal.Strip(), normal.Prepend(" ")]
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = _join(library, library.decoders.Fuse())
    trainer = library.trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), show_progress=False
    )
    tokenizer.train_from_iterator(_some_text(lines), trainer)
    return Tokenizer(tokenizer)


def train_characters(
    lines: Iterable[str], *, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """One id for every Unicode character of `lines`, in order of code point.

    Text of these characters is decoded exactly; any other is `<unk>`, decoded to nothing, or
    where `special_tokens` has none (`()` leaves only the characters) a `DataError` that names it.
    `DataError` when there is no text.
    """
    _check_special_tokens(special_tokens)
    library = extras.load("tokenizers")
    characters = sorted(set().union(*_some_text(lines)))
    vocabulary = {token: i for i, token in enumerate((*special_tokens, *characters))}
    # A BPE without merges is a table of characters.
    model = library.models.BPE(
        vocab=vocabulary, merges=[], unk_token=name_of("unk", special_tokens), fuse_unk=False
    )
    tokenizer = library.Tokenizer(model)
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.decoder = library.decoders.Fuse()
    return Tokenizer(tokenizer)


def _join(library, pieces) -> "tokenizers.decoders.Decoder":
    """Decodes by `pieces`, then takes off the one space that was put before the sentence."""
    return library.decoders.Sequence([pieces, library.decoders.Strip(" ", 1, 0)])


def _some_text(lines: Iterable[str]) -> Iterator[str]:
    empty = True
    for number, line in enumerate(lines, start=1):
        if not is_text(line):
            raise DataError(f"line {number} of the training text: {why_not_text(line)}")
        empty = empty and not line.strip()
        yield line
    if empty:
        raise DataError("a tokenizer needs text to learn from; all lines given were blank")


def _check_size(vocab_size: int, least: int, what: str, special_tokens: Sequence[str]) -> None:
    needed = least + len(special_tokens)
    if vocab_size < needed:
        raise ConfigError(
            f"vocab_size must be at least {needed} ({what} and {len(special_tokens)} special "
            f"tokens), got {vocab_size}"
        )


def _check_special_tokens(names: Sequence[str]) -> None:
    if isinstance(names, str) or len(set(names)) < len(names):
        raise ConfigError(f"special tokens must be a sequence of different names, got {names!r}")
    for name in names:
        if not (isinstance(name, str) and BRACKETS.fullmatch(name)):
            raise ConfigError(f"a special token is written <name> or [NAME], got {name!r}")
