"""Tokenizers from files: those trained here, and those published with a model's weights."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxformer import optional_dependencies
from jaxformer.errors import DataError
from jaxformer.storage import to_path
from jaxformer.text.tokenizers.sentencepiece import read_sentencepiece
from jaxformer.text.tokenizers.tokenizer import (
    ROLE_NAMES,
    Tokenizer,
    find_role,
    require_standard_ids,
)

if TYPE_CHECKING:
    import tokenizers

_MARIAN = ("source.spm", "target.spm", "vocab.json")

_EXTRA_IDS = 100


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in the file `path`, or in the folder `path` of a published model.

    A folder has the files of one of `TOKENIZER_FILES`: `tokenizer.json`, or two SentencePiece
    models and `vocab.json` (Marian), byte-level BPE (GPT-2), WordPiece (BERT), or a SentencePiece
    model (T5). `tokenizer_config.json` says whether BERT's is lower-cased. For Marian this
    is the tokenizer of the source; `load_pair` gives that of the target too. Raises `DataError` for
    files that are absent, damaged or do not fit together, and `MissingExtra` for SentencePiece
    models without `sentencepiece`.

    >>> from jaxformer.text import tokenizers
    >>> tokenizers.train_words(["a rose"], 10).save("words.json")
    >>> tokenizers.load("words.json").encode("a rose")
    [4, 5]
    """
    path = to_path(path)
    if not path.is_dir():
        return Tokenizer(_read_json(path))
    read = _reader(path)
    if read is None:
        raise DataError(
            f"{path}: a tokenizer's folder holds "
            f"{', or '.join(' and '.join(names) for names in TOKENIZER_FILES)}; this one does not"
        )
    return Tokenizer(read(path))


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` has all files of one of `TOKENIZER_FILES`."""
    return _reader(folder) is not None


def _reader(folder: Path) -> Callable[[Path], "tokenizers.Tokenizer"] | None:
    files = TOKENIZER_FILES.items()
    sets = (read for names, read in files if all((folder / name).exists() for name in names))
    return next(sets, None)


def load_pair(path: str | os.PathLike[str]) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of source and target; one object except in Marian's folders. See `load`."""
    path, source = Path(path), load(path)
    marian = (path / name for name in _MARIAN)
    if (path / "tokenizer.json").exists() or not all(file.exists() for file in marian):
        return source, source
    return source, Tokenizer(_read_marian(path, "target"))


def load_standard(path: str | os.PathLike[str]) -> Tokenizer:
    """Like `load`; raises `DataError` unless `require_standard_ids` accepts the tokenizer."""
    tokenizer = load(path)
    try:
        return require_standard_ids(tokenizer)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the tokenizer: {error}") from error


def _read_json(path: Path) -> "tokenizers.Tokenizer":
    library = optional_dependencies.load("tokenizers")
    text = _read_text(path)
    try:
        return library.Tokenizer.from_str(text)
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not a whole tokenizer.json: {error}") from error


def _read_gpt2(folder: Path) -> "tokenizers.Tokenizer":
    """Byte-level BPE with the byte alphabet of GPT-2 (Radford et al. 2019, 2.2)."""
    library = optional_dependencies.load("tokenizers")
    vocabulary, path = _read_vocabulary(folder / "vocab.json"), folder / "merges.txt"
    try:
        _, merges = library.models.BPE.read_file(str(folder / "vocab.json"), str(path))
        model = library.models.BPE(vocabulary, merges, unk_token=find_role("unk", vocabulary))
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not the merges of vocab.json: {error}") from error
    tokenizer = library.Tokenizer(model)
    space = _read_option(folder, "add_prefix_space", False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=space)
    tokenizer.decoder = library.decoders.ByteLevel()
    roles = dict.fromkeys(name for names in ROLE_NAMES.values() for name in names)
    tokenizer.add_special_tokens([name for name in roles if name in vocabulary])
    return tokenizer


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = _read_object(path)
    ids = vocabulary.values()
    if not all(type(i) is int for i in ids) or sorted(ids) != list(range(len(ids))):
        raise DataError(f"{path}: its {len(ids)} tokens must have the ids from 0, each once")
    return vocabulary


def _read_object(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a whole JSON file: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: must hold a JSON object, got {type(content).__name__}")
    return content


def _read_bert(folder: Path) -> "tokenizers.Tokenizer":
    """WordPiece with one token per line; the line number is the id (Devlin et al. 2019, 3)."""
    library = optional_dependencies.load("tokenizers")
    options = {
        "handle_chinese_chars": _read_option(folder, "tokenize_chinese_chars", True),
        "strip_accents": _read_option(folder, "strip_accents", None),
        "lowercase": _read_option(folder, "do_lower_case", True),
    }
    path = folder / "vocab.txt"
    try:
        words = library.models.WordPiece.read_file(str(path))
        tokenizer = library.implementations.BertWordPieceTokenizer(words, **options)
        return library.Tokenizer.from_str(tokenizer.to_str())
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not BERT's vocabulary of one token a line: {error}") from error


def _read_marian(
    folder: Path, side: Literal["source", "target"] = "source"
) -> "tokenizers.Tokenizer":
    """The pieces of one side; both sides share the ids unless the target has a file of its own."""
    separate = side == "target" and _read_option(folder, "separate_vocabs", False)
    vocabulary = _read_vocabulary(folder / ("target_vocab.json" if separate else "vocab.json"))
    return read_sentencepiece(folder / f"{side}.spm", vocabulary)


def _read_t5(folder: Path) -> "tokenizers.Tokenizer":
    """The pieces, then `<extra_id_99>` to `<extra_id_0>` (Raffel et al. 2020, 3.1)."""
    path = folder / "tokenizer_config.json"
    count = _read_object(path).get("extra_ids", _EXTRA_IDS) if path.exists() else _EXTRA_IDS
    if type(count) is not int or count < 0:
        raise DataError(f"{path}: extra_ids must be a number from 0, got {count!r}")
    names = [f"<extra_id_{number}>" for number in reversed(range(count))]
    return read_sentencepiece(folder / "spiece.model", extra_tokens=names)


def _read_option(folder: Path, name: str, default: bool | None) -> bool | None:
    """The option `name` of tokenizer_config.json, or `default`."""
    path = folder / "tokenizer_config.json"
    value = _read_object(path).get(name, default) if path.exists() else default
    if value is not default and not isinstance(value, bool):
        raise DataError(f"{path}: {name} must be true or false, got {value!r}")
    return value


TOKENIZER_FILES: Mapping[tuple[str, ...], Callable[[Path], "tokenizers.Tokenizer"]] = {
    ("tokenizer.json",): lambda folder: _read_json(folder / "tokenizer.json"),
    _MARIAN: _read_marian,
    ("vocab.json", "merges.txt"): _read_gpt2,
    ("vocab.txt",): _read_bert,
    ("spiece.model",): _read_t5,
}
"""The files of a tokenizer in a folder, and what reads them; the first complete set is read."""
