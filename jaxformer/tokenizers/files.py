"""Tokenizers in files: ours and those that others publish beside their weights."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxformer import extras
from jaxformer.tokenizers.special import BRACKETS, NAMES, name_of
from jaxformer.tokenizers.tokenizer import DataError, Tokenizer, require_own

if TYPE_CHECKING:
    import tokenizers

# RoBERTa's vocabulary has three words that no merge makes; a file cut short leaves far more.
_UNMADE = 100


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in the file `path`, or in the folder `path` as it is customary elsewhere.

    A folder holds `tokenizer.json`, else `vocab.json` and `merges.txt` (byte-level BPE as GPT-2's),
    else `vocab.txt` (WordPiece as BERT's); `tokenizer_config.json` beside them says whether
    BERT's keeps capitals. Raises `DataError` for what is absent, damaged or does not fit together.
    """
    path = Path(path)
    if not path.is_dir() or (path / "tokenizer.json").exists():
        return Tokenizer(_read_json(path / "tokenizer.json" if path.is_dir() else path))
    if (path / "vocab.json").exists():
        return Tokenizer(_read_gpt2(path))
    if (path / "vocab.txt").exists():
        return Tokenizer(_read_bert(path))
    raise DataError(
        f"{path}: a tokenizer's folder holds tokenizer.json, or vocab.json and merges.txt, or "
        "vocab.txt; this one does not"
    )


def load_own(path: str | os.PathLike[str]) -> Tokenizer:
    """As `load`, for a vocabulary trained here: `DataError` unless `require_own` takes it."""
    tokenizer = load(path)
    try:
        return require_own(tokenizer)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the tokenizer: {error}") from error


def _read_json(path: Path) -> "tokenizers.Tokenizer":
    library = extras.load("tokenizers")
    text = _read_text(path)
    try:
        return library.Tokenizer.from_str(text)
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not a whole tokenizer.json: {error}") from error


def _read_gpt2(folder: Path) -> "tokenizers.Tokenizer":
    """Byte-level BPE, the bytes written as GPT-2 writes them (Radford et al. 2019, 2.2)."""
    library = extras.load("tokenizers")
    vocabulary = _read_vocabulary(folder / "vocab.json")
    merges = _read_merges(folder / "merges.txt", vocabulary)
    space = _setting(folder, "add_prefix_space", False)
    model = library.models.BPE(vocabulary, merges, unk_token=name_of("unk", vocabulary))
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = library.decoders.ByteLevel()
    return _with_special(tokenizer, vocabulary)


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = _read_table(path)
    ids = vocabulary.values()
    if not all(type(i) is int for i in ids) or sorted(ids) != list(range(len(ids))):
        raise DataError(f"{path}: its {len(ids)} tokens must have the ids from 0, each once")
    return vocabulary


def _read_table(path: Path) -> dict:
    text = _read_text(path)
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a whole JSON file: {error}") from error
    if not isinstance(table, dict):
        raise DataError(f"{path}: must be a table of names and values, got {type(table).__name__}")
    return table


def _read_merges(path: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    *lines, rest = _read_text(path).split("\n")
    if rest:
        raise DataError(f"{path}: cut short: the last line has no end")
    merges = []
    for number, line in enumerate(lines, start=1):
        if number == 1 and line.startswith("#version"):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise DataError(
                f"{path}:{number}: a merge is two tokens that make a third, all in vocab.json, "
                f"got {line!r}"
            )
        merges.append((left, right))
    made = {left + right for left, right in merges}
    unmade = [x for x in vocabulary if len(x) > 1 and x not in made and not BRACKETS.fullmatch(x)]
    if len(unmade) > _UNMADE:
        raise DataError(
            f"{path}: not the whole list that belongs to vocab.json: {len(unmade)} tokens come "
            f"from no merge, {unmade[0]!r} among them"
        )
    return merges


def _read_bert(folder: Path) -> "tokenizers.Tokenizer":
    """WordPiece, one token a line, the number of the line its id (Devlin et al. 2019, 3)."""
    library = extras.load("tokenizers")
    path = folder / "vocab.txt"
    words = [line.rstrip("\r") for line in _read_text(path).removesuffix("\n").split("\n")]
    vocabulary = {word: i for i, word in enumerate(words)}
    unknown = name_of("unk", vocabulary)
    if len(vocabulary) < len(words) or unknown is None:
        twice = next((word for i, word in enumerate(words) if vocabulary[word] != i), None)
        reason = "there is no [UNK]" if twice is None else f"{twice!r} stands there twice"
        raise DataError(f"{path}: not a vocabulary of one token a line: {reason}")
    tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = library.normalizers.BertNormalizer(
        handle_chinese_chars=_setting(folder, "tokenize_chinese_chars", True),
        strip_accents=_setting(folder, "strip_accents", None),
        lowercase=_setting(folder, "do_lower_case", True),
    )
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return _with_special(tokenizer, vocabulary)


def _setting(folder: Path, name: str, default: bool | None) -> bool | None:
    """What tokenizer_config.json says, `default` if it does not."""
    path = folder / "tokenizer_config.json"
    value = _read_table(path).get(name, default) if path.exists() else default
    if value is not default and not isinstance(value, bool):
        raise DataError(f"{path}: {name} must be true or false, got {value!r}")
    return value


def _with_special(
    tokenizer: "tokenizers.Tokenizer", vocabulary: Iterable[str]
) -> "tokenizers.Tokenizer":
    """`tokenizer` in which the tokens of `vocabulary` that have a role are special."""
    roles = dict.fromkeys(name for names in NAMES.values() for name in names)
    tokenizer.add_special_tokens([name for name in roles if name in vocabulary])
    return tokenizer
