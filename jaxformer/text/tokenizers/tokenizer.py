"""Text to ids and back, and the special tokens: their roles and their names in vocabularies."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxformer import optional_dependencies
from jaxformer.errors import ConfigError, DataError, shorten
from jaxformer.storage import replacing, to_path
from jaxformer.text.tokenizers.languages import Languages, Template

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


_NOTHING = Template()

# T5's sentinels (Raffel et al. 2020, 3.1.4), which a text writes where a part of it is left out.
_SENTINEL = re.compile(r"<extra_id_\d+>")

# The names of each role in our vocabularies, BERT's, GPT-2's and SentencePiece's, in this order.
ROLE_NAMES: dict[str, tuple[str, ...]] = {
    "pad": ("<pad>", "[PAD]"),
    "bos": ("<bos>", "[CLS]", "<|endoftext|>", "<s>", "<|begin_of_text|>"),
    "eos": ("<eos>", "[SEP]", "<|endoftext|>", "</s>", "<|end_of_text|>"),
    "unk": ("<unk>", "[UNK]"),
    "mask": ("<mask>", "[MASK]"),
}


def find_role(role: str, tokens: Iterable[str]) -> str | None:
    """The token in `tokens` whose name has the role `role`, or None."""
    tokens = set(tokens)
    return next((name for name in ROLE_NAMES[role] if name in tokens), None)


def all_special_ids(tokenizer: "tokenizers.Tokenizer") -> dict[str, int]:
    """The id of every special token of the tokenizer by its name, whether it has a role or not."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: index for index, token in added.items() if token.special}


def find_special_tokens(
    tokenizer: "tokenizers.Tokenizer", roles: Mapping[str, str | None] | None = None
) -> SpecialTokens:
    """The ids of the special tokens that have a role.

    `roles` names the token of each role; None: tokens are recognised by the names in `ROLE_NAMES`.
    """
    ids = all_special_ids(tokenizer)
    if roles is None:
        roles = {role: find_role(role, ids) for role in SpecialTokens._fields}
    return SpecialTokens(**{role: ids.get(name or "") for role, name in roles.items()})


def with_same_model(
    tokenizer: "tokenizers.Tokenizer", not_special: Set[int] = frozenset()
) -> "tokenizers.Tokenizer":
    """A new tokenizer of the library with the parts of `tokenizer`, without cutting and padding.

    Both share one model, because copying the model of 262,144 tokens takes seconds. In the new one
    the added tokens with the ids `not_special` are ordinary tokens.
    """
    library = optional_dependencies.load("tokenizers")
    made = library.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        value = getattr(tokenizer, part)
        if value is not None:
            setattr(made, part, value)
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    made.add_tokens([_as_ordinary(x) if i in not_special else x for i, x in added])
    return made


def _as_ordinary(token: "tokenizers.AddedToken") -> "tokenizers.AddedToken":
    """The added token `token`, which is not special."""
    return optional_dependencies.load("tokenizers").AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def find_template(tokenizer: "tokenizers.Tokenizer") -> Template | None:
    """The special tokens that the tokenizer puts around a text; None: it puts none."""
    if tokenizer.post_processor is None:
        return None
    state = json.loads(tokenizer.post_processor.__getstate__())
    found = _NOTHING
    for step in state.get("processors", [state]):
        if step["type"] == "TemplateProcessing":
            found = _template_of(step)
        elif step["type"] in ("BertProcessing", "RobertaProcessing"):
            found = Template((step["cls"][1],), (step["sep"][1],))
    return None if found == _NOTHING else found


def _template_of(step: Mapping[str, Any]) -> Template:
    """The template in the JSON of a `TemplateProcessing`, for a single text."""
    before: list[int] = []
    after: list[int] = []
    side = before
    for piece in step["single"]:
        if "SpecialToken" in piece:
            side += step["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        else:  # the text
            side = after
    return Template(tuple(before), tuple(after))


class Tokenizer:
    """Converts text to a list of ids and back, with a tokenizer of the `tokenizers` library.

    `roles` is what a folder says of its special tokens: the name of the token of each role, None
    for a role without a token. Without `roles` the tokens are recognised by their names.
    `languages` are the languages of a translator's texts. `model_vocab_size` is the number of ids
    that the model has: some published models have fewer than their tokenizer. A text with a token
    beyond it is refused.

    Attributes: `special`, the ids of the special tokens that have a role; `special_ids`, the id of
    every special token by its name; `template`, the special tokens that it puts around a text, None
    if it puts none; `vocab_size`, the highest id that a text may have plus one. It shares the model
    with the library's tokenizer that it was made of: training that one again changes both.

    >>> tokenizer = jf.train_bpe(["a rose is a rose"], 264)
    >>> ids = tokenizer.encode("a rose")
    >>> [tokenizer.token(index) for index in ids], tokenizer.decode(ids)
    (['Ġa', 'Ġros', 'e'], 'a rose')
    >>> tokenizer.vocab_size, tokenizer.special.eos
    (264, 2)
    """

    def __init__(
        self,
        tokenizer: "tokenizers.Tokenizer",
        roles: Mapping[str, str | None] | None = None,
        languages: Languages | None = None,
        model_vocab_size: int | None = None,
    ) -> None:
        # Truncation and padding, which a file made elsewhere may store, are left out.
        tokenizer = with_same_model(tokenizer)
        vocabulary = tokenizer.get_vocab()
        if roles is not None:  # `decode` leaves them out, as the folder's own tokenizer does
            ordinary = vocabulary.keys() - all_special_ids(tokenizer)
            tokenizer.add_special_tokens([name for name in roles.values() if name in ordinary])
        # Without this "<pad>" in a text would become id 0; tokenizer.json does not store it.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        # Reads the names of special tokens as tokens, which is the setting of a new tokenizer.
        self._with_special = with_same_model(tokenizer)
        self.roles: Mapping[str, str | None] | None = roles
        self.languages: Languages | None = languages
        self.special: SpecialTokens = find_special_tokens(tokenizer, roles)
        self.template: Template | None = find_template(tokenizer)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self._has_more_ids = False
        if model_vocab_size is not None and model_vocab_size < self.vocab_size:
            added = tokenizer.get_added_tokens_decoder()
            if all(i in added for i in vocabulary.values() if i >= model_vocab_size):
                self.vocab_size = model_vocab_size
                self._has_more_ids = True
        self.special_ids: Mapping[str, int] = all_special_ids(tokenizer)
        self._typed: set[int] = {i for x, i in self.special_ids.items() if _SENTINEL.fullmatch(x)}
        if self.special.mask is not None:
            self._typed.add(self.special.mask)
        self._typed_tokenizer = tokenizer
        if self._typed & {*self.special_ids.values()}:
            self._typed_tokenizer = with_same_model(tokenizer, not_special=self._typed)
            self._typed_tokenizer.encode_special_tokens = True
        self._special_from_text: set[int] = set()
        self._vocabulary_only: dict[str, int] = {}
        if isinstance(tokenizer.model, optional_dependencies.load("tokenizers").models.Unigram):
            # "</s>" is a piece like any other of T5's, so that name would end a text.
            self._special_from_text = {*self.special_ids.values()} - {self.special.unk}
            # `read_sentencepiece` puts a space in front of pieces that its model does not have.
            pieces = vocabulary.items()
            self._vocabulary_only = {x[1:]: i for x, i in pieces if x.startswith(" ")}

    @cached_property
    def _special_names(self) -> re.Pattern[str]:
        """A pattern of the names of special tokens, made when it is needed: there may be 6,000."""
        return _any_of(self.special_ids)

    @property
    def library_tokenizer(self) -> "tokenizers.Tokenizer":
        """The tokenizer of the `tokenizers` library; do not change it."""
        return self._tokenizer

    def to_library(self) -> "tokenizers.Tokenizer":
        """A new tokenizer of the `tokenizers` library with the same parts, which may be changed.

        The names of special tokens in a text are text to it. Both hold one model.
        """
        made = with_same_model(self._tokenizer)
        made.encode_special_tokens = True
        return made

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokenizer's JSON: equal for equal tokenizers."""
        return hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def check_fits(self, vocab_size: int) -> None:
        """Raises `ConfigError` where texts have ids outside the `vocab_size` ids of a model."""
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"the tokenizer has {self.vocab_size} ids, but the model has only {vocab_size}: "
                "give the tokenizer that the model was trained with"
            )
        for role in ("bos", "eos"):
            index = getattr(self.special, role)
            if index is not None and index >= vocab_size:
                raise ConfigError(
                    f"the tokenizer's {role}_token {self._tokenizer.id_to_token(index)!r} has the "
                    f"id {index}, but the model has only {vocab_size} ids: give the tokenizer that "
                    "the model was trained with"
                )

    @property
    def padding_id(self) -> int:
        """The id that fills rows up: the padding token's, or 0 if there is none.

        Raises `DataError` for an id that the model lacks.
        """
        index = self.special.pad or 0
        if index >= self.vocab_size:
            raise DataError(
                f"rows are filled up with {self._tokenizer.id_to_token(index)!r}, which has the id "
                f"{index}, but the model's ids end at {self.vocab_size - 1}: name another "
                "pad_token in tokenizer_config.json"
            )
        return index

    def check_ids(self, rows: Sequence[Sequence[int] | Int[np.ndarray, " ids"]]) -> None:
        """Raises `DataError`, naming its text and its token, for an id that the model lacks."""
        if not self._has_more_ids:
            return
        for number, row in enumerate(rows, start=1):
            index = int(max(row, default=0))
            if index >= self.vocab_size:
                raise DataError(
                    f"text {number} of {len(rows)} has the token "
                    f"{self._tokenizer.id_to_token(index)!r} with the id {index}, but the model's "
                    f"ids end at {self.vocab_size - 1}: leave it out of the text"
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
        check_list("texts", lines)
        rows = self._encode(self._tokenizer, list(lines))
        self.check_ids(rows)
        return rows

    def encode_inputs(
        self,
        texts: Sequence[str],
        default: Template = _NOTHING,
        language: str | None = None,
    ) -> list[list[int]]:
        """The ids that a model reads for each text, as the folder's own tokenizer gives them.

        Special tokens are put around each text: by `language`, if the tokenizer marks languages
        (None: the folder's language), else by its template, else by `default`. In a text, the names
        of the mask and of T5's sentinels stand for these tokens, since people type them; the names
        of other special tokens are ordinary text. Raises `ConfigError` for an unknown language.
        """
        first, last = self.template or default
        if self.languages is not None:
            first, last = self.languages.template(language)
        elif language is not None:
            raise ConfigError(
                f"language={language!r}, but the folder's tokenizer does not mark the language of "
                "a text: leave it out"
            )
        check_list("texts", texts)
        rows = self._encode(self._typed_tokenizer, list(texts))
        rows = [[*first, *row, *last] for row in rows]
        self.check_ids(rows)
        return rows

    def _encode(self, tokenizer: "tokenizers.Tokenizer", lines: list[str]) -> list[list[int]]:
        kept: set[int] = self._typed if tokenizer is self._typed_tokenizer else set()
        try:
            rows = self._ids(tokenizer, lines)
            if self._special_from_text:
                rows = [[i for x in row for i in self._spell_out(x, kept)] for row in rows]
        except TypeError as error:
            number, line = next((i, x) for i, x in enumerate(lines, 1) if not is_text(x))
            raise DataError(f"text {number} of {len(lines)}: {why_not_text(line)}") from error
        except Exception as error:  # the library has no narrower class
            raise DataError(f"the tokenizer cannot read this text: {error}") from error
        return rows

    def encode_with_special(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """(ids, spans) of each text, in which the name of a special token is that token.

        A span is where the characters of an id begin and end in the text. For text that a program
        has written, such as a chat template; `encode` takes all names for text.
        """
        check_list("texts", texts)
        encodings = self._with_special.encode_batch(list(texts), add_special_tokens=False)
        self.check_ids([encoding.ids for encoding in encodings])
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def find_special_name(self, text: str) -> str | None:
        """The first name of a special token in `text`, or None."""
        found = self._special_names.search(text)
        return found.group() if found else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens; `DataError` for an id without a token."""
        return self.decode_batch([ids])[0]

    def decode_batch(self, batch: Iterable[Sequence[int]]) -> list[str]:
        """The text of every list of ids; see `decode`."""
        rows = [np.asarray(ids) for ids in batch]
        size = self.vocab_size
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
        """Writes the tokenizer to the file `path` as JSON, completely or not at all.

        The roles and languages that a folder said, and the number of ids of a model that has fewer,
        go to a file beside it, in which `load` finds them: tokenizer_config.json for
        tokenizer.json.
        """
        with replacing(path) as unfinished:
            unfinished.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        named: dict[str, Any] = {}
        if self.roles is not None:
            named = {f"{role}_token": name for role, name in self.roles.items()}
            if self.languages is not None:
                named["languages"] = self.languages._asdict()
        if self._has_more_ids:
            named["model_vocab_size"] = self.vocab_size
        if named:
            with replacing(config_path(to_path(path))) as unfinished:
                unfinished.write_text(json.dumps(named, indent=2), encoding="utf-8")

    def _ids(self, tokenizer: "tokenizers.Tokenizer", lines: list[str]) -> list[list[int]]:
        """The ids of every line. A piece that the vocabulary has and its model lacks is known."""
        if not self._vocabulary_only:
            encodings = tokenizer.encode_batch_fast(lines, add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        encodings = tokenizer.encode_batch(lines, add_special_tokens=False)
        return [
            [
                self._vocabulary_only.get(piece, index) if index == self.special.unk else index
                for index, piece in zip(encoding.ids, encoding.tokens, strict=True)
            ]
            for encoding in encodings
        ]

    def _spell_out(self, index: int, kept: set[int]) -> list[int]:
        """The id itself, or for a special token not `kept` the ids of its name's characters."""
        if index in kept or index not in self._special_from_text:
            return [index]
        model = self._tokenizer.model
        return [piece.id for x in self.token(index) for piece in model.tokenize(x)]


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `names`, the longest one at a place."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def require_standard_ids(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer` itself; `DataError` unless its special ids are `PAD`, `BOS`, `EOS` and `UNK`."""
    if tokenizer.special[: len(SPECIAL_TOKENS)] != (PAD, BOS, EOS, UNK):
        raise DataError(
            f"ids 0 to 3 must be the special tokens {' '.join(SPECIAL_TOKENS)}, got "
            f"{tokenizer.special}: train it with train_bpe, train_words or train_characters"
        )
    return tokenizer


def config_path(path: Path) -> Path:
    """The file beside the tokenizer's file `path` that names the roles of its tokens."""
    return path.with_name(f"{path.stem}_config.json")


def check_list(name: str, texts: Any) -> None:
    """Raises `DataError` for `texts` that are no sequence of texts; the error calls them `name`.

    Iterating would give the letters of a string, the keys of a mapping, the names of the columns of
    a table such as a DataFrame, and nothing of an array without dimensions.
    """
    kind = type(texts).__name__
    if isinstance(texts, str):
        raise DataError(f"the {name} are one string: give a list, also for one text")
    if hasattr(texts, "columns"):
        columns = ", ".join(map(str, list(texts.columns)[:5]))
        raise DataError(
            f"the {name} are a table ({kind}) with the columns {columns}: give the one that holds "
            "the texts, such as table['text']"
        )
    if isinstance(texts, bytes | Set | Mapping) or not isinstance(texts, Iterable):
        raise DataError(f"the {name} are of the type {kind}, but must be a list of strings")
    if getattr(texts, "ndim", 1) == 0:
        raise DataError(f"the {name} are an array without dimensions: give a list of strings")


def is_text(line: Any) -> bool:
    """Whether `line` is a string without lone surrogates."""
    return isinstance(line, str) and not re.search("[\ud800-\udfff]", line)


def why_not_text(line: Any) -> str:
    """The reason why `line` is not text."""
    if not isinstance(line, str):
        return f"a text must be str, got {type(line).__name__}"
    return f"a lone surrogate is no character; read the text as UTF-8: {shorten(line)!r}"
