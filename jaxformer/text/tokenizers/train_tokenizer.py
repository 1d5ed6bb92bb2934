"""Vocabularies learned from text: byte-level BPE, words, characters."""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError
from jaxformer.text.tokenizers.tokenizer import (
    SPECIAL_TOKEN,
    SPECIAL_TOKENS,
    Tokenizer,
    check_list,
    find_role,
    is_text,
    why_not_text,
)

if TYPE_CHECKING:
    import tokenizers

_BYTES = 256
_LONGEST_WORD = 1_000  # characters: each merge goes through the whole word
_TIMES = f"{{{_LONGEST_WORD}}}"
# The letters, digits or signs of a word of byte-level BPE.
_LONG_WORD = re.compile(rf"([^\W\d_]{_TIMES}|[\d_]{_TIMES}|[^\w\s]{_TIMES})(?=\S)")

# A capital sigma that ends a word (the Unicode Standard, 3.13, Final_Sigma); what matches is the
# letter alone. The library's lower case does not look at the letters around it.
_LAST_SIGMA = r"\p{Cased}\p{Case_Ignorable}*\KΣ(?!\p{Case_Ignorable}*\p{Cased})"


def train_bpe(
    lines: Iterable[str],
    vocab_size: int,
    *,
    prefix: Literal["", " "] = " ",
    lowercase: bool = False,
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
) -> Tokenizer:
    """A byte-level BPE with at most `vocab_size` ids; decode(encode(text)) == text.

    Every byte has an id, so no text is unknown. With the prefix " " a space is put before each
    text, so that its first word is the same token as elsewhere; decoding removes the space. With
    "" nothing is added, and a text cut at single line feeds has the same ids as the whole. With
    `lowercase` text is put into lower case before it is encoded, and so is what is decoded. There
    are fewer ids when the text has no pair left to merge. Words of more than 1,000 characters are
    cut for learning, with a warning: time stays linear. Raises `ConfigError` for fewer ids than
    256 bytes and the special tokens, `DataError` when there is no text. Sennrich et al. 2016;
    bytes as in GPT-2 (Radford et al. 2019).

    >>> tokenizer = jf.train_bpe(["aaaa aaaa"], 262)  # 256 bytes, 4 special tokens, 2 merges
    >>> [tokenizer.token(index) for index in tokenizer.encode("aaaa!")]
    ['Ġaa', 'aa', '!']
    >>> tokenizer.decode(tokenizer.encode("Grüße!"))  # every byte has an id
    'Grüße!'
    """
    _check_special_tokens(special_tokens)
    _check_size(vocab_size, _BYTES, "256 bytes", special_tokens)
    if prefix not in ("", " "):
        raise ConfigError(f'prefix must be "" or " ", got {prefix!r}')
    library = optional_dependencies.load("tokenizers")
    pieces = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = pieces(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    steps: list[tokenizers.normalizers.Normalizer] = []
    if lowercase:
        last_sigma = library.normalizers.Replace(library.Regex(_LAST_SIGMA), "ς")
        steps += [last_sigma, library.normalizers.Lowercase()]
    if prefix:
        steps.append(library.normalizers.Prepend(prefix))
        tokenizer.decoder = _join(library, tokenizer.decoder)
    if steps:
        tokenizer.normalizer = steps[0] if len(steps) == 1 else library.normalizers.Sequence(steps)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_added(library, special_tokens, before=True, after=bool(prefix)),
        initial_alphabet=pieces.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_cut_words(_some_text(lines)), trainer)
    return Tokenizer(tokenizer)


def train_words(
    lines: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """A word-level tokenizer: the most frequent words of `lines`, at most `vocab_size` ids.

    Words are separated by white space only; punctuation is part of a word. Decoding joins words
    with one space; words outside the vocabulary are `<unk>`, which is decoded to nothing. Raises
    `ConfigError` for special tokens without `<unk>` and for fewer ids than the special tokens and
    one word, `DataError` when there is no text.

    >>> tokenizer = train_words(["a rose is a rose"], 6)  # 4 special tokens and 2 words
    >>> tokenizer.encode("a rose is"), tokenizer.special.unk
    ([4, 5, 3], 3)
    """
    _check_special_tokens(special_tokens)
    _check_size(vocab_size, 1, "a word", special_tokens)
    unknown = find_role("unk", special_tokens)
    if unknown is None:
        raise ConfigError(f"words need <unk> among the special tokens, got {special_tokens}")
    library = optional_dependencies.load("tokenizers")
    normal = library.normalizers
    tokenizer = library.Tokenizer(library.models.WordLevel(unk_token=unknown))
    # A word includes the space before it, so the word "<pad>" is not the token "<pad>".
    tokenizer.normalizer = normal.Sequence(
        [normal.Replace(library.Regex(r"\s+"), " "), normal.Strip(), normal.Prepend(" ")]
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = _join(library, library.decoders.Fuse())
    trainer = library.trainers.WordLevelTrainer(
        vocab_size=vocab_size,
        special_tokens=_added(library, special_tokens, before=True, after=True),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_some_text(lines), trainer)
    return Tokenizer(tokenizer)


def train_characters(
    lines: Iterable[str], *, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """One id for every Unicode character of `lines`, in order of code point.

    Text of these characters is decoded exactly. Another character is `<unk>`, which is decoded to
    nothing; without `<unk>` in `special_tokens` encoding it raises a `DataError`. Raises
    `DataError` when there is no text.

    >>> tokenizer = train_characters(["abba"])
    >>> tokenizer.encode("ab"), tokenizer.vocab_size  # after 4 special tokens
    ([4, 5], 6)
    """
    _check_special_tokens(special_tokens)
    library = optional_dependencies.load("tokenizers")
    characters: set[str] = set()
    for line in _some_text(lines):  # one at a time: a text may be larger than memory
        characters.update(line)
    tokens = [*special_tokens, *sorted(characters)]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = find_role("unk", special_tokens)
    tokenizer = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.decoder = library.decoders.Fuse()
    return Tokenizer(tokenizer)


def _join(
    library: ModuleType, pieces: "tokenizers.decoders.Decoder"
) -> "tokenizers.decoders.Decoder":
    """Decodes by `pieces`, then removes the space that encoding put before the text."""
    return library.decoders.Sequence([pieces, library.decoders.Strip(" ", 1, 0)])


def _added(
    library: ModuleType, names: Sequence[str], *, before: bool, after: bool
) -> list["tokenizers.AddedToken"]:
    """Special tokens; a mask takes the spaces `before` and `after` it that no token needs."""
    mask = find_role("mask", names)
    spaces = {name: {"lstrip": before, "rstrip": after} if name == mask else {} for name in names}
    return [library.AddedToken(name, special=True, **kept) for name, kept in spaces.items()]


def _cut_words(lines: Iterable[str]) -> Iterator[str]:
    """`lines` with a space in words that are too long, as in a text without spaces."""
    has_warned = False
    for line in lines:
        if len(line) > _LONGEST_WORD and any(len(x) > _LONGEST_WORD for x in line.split()):
            line, cuts = _LONG_WORD.subn(r"\1 ", line)
            if cuts and not has_warned:
                has_warned = True
                warnings.warn(
                    f"words of more than {_LONGEST_WORD:,} characters are cut while the vocabulary "
                    "is learned: does the text lack spaces?",
                    stacklevel=3,
                )
        yield line


def _some_text(lines: Iterable[str]) -> Iterator[str]:
    check_list("lines of the training text", lines)
    is_blank = True
    for number, line in enumerate(lines, start=1):
        if not is_text(line):
            raise DataError(f"line {number} of the training text: {why_not_text(line)}")
        if line.strip():
            is_blank = False
        yield line
    if is_blank:
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
        if not (isinstance(name, str) and SPECIAL_TOKEN.fullmatch(name)):
            raise ConfigError(f"a special token is written <name> or [NAME], got {name!r}")
