"""Tokenizers in files: ours and those that others publish beside their weights."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxformer import extras
from jaxformer.tokenizers.pieces import read_pieces
from jaxformer.tokenizers.special import BRACKETS, NAMES, name_of
from jaxformer.tokenizers.tokenizer import DataError, Tokenizer, require_own

if TYPE_CHECKING:
    import tokenizers

# RoBERTa's vocabulary has three words that no merge makes; a file cut short leaves far more.
_UNMADE = 100

_MARIAN = ("source.spm", "target.spm", "vocab.json")

_GAPS, _MOST_GAPS = 100, 10_000


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in the file `path`, or in the folder `path` as it is customary elsewhere.

    A folder holds the files of one of `FILES`: `tokenizer.json`, else Marian's two models of
    SentencePiece and the ids of their pieces, else byte-level BPE as GPT-2's, WordPiece as BERT's,
    T5's or Llama's model of SentencePiece. `tokenizer_config.json` beside them says whether BERT's
    keeps capitals. Marian's reads the source and decodes the target: see `load_target`. Raises
    `DataError` for what is absent, damaged or does not fit together, and `MissingExtra` for
    SentencePiece's files without `sentencepiece`.
    """
    path = Path(path)
    if not path.is_dir():
        return Tokenizer(_read_json(path))
    for names, read in FILES.items():
        if all((path / name).exists() for name in names):
            return Tokenizer(read(path))
    raise DataError(
        f"{path}: a tokenizer's folder holds "
        f"{', or '.join(' and '.join(names) for names in FILES)}; this one does not"
    )


def load_target(path: str | os.PathLike[str]) -> Tokenizer:
    """As `load`, but of Marian's files the tokenizer that reads the target."""
    path = Path(path)
    marian = (path / name for name in _MARIAN)
    if (path / "tokenizer.json").exists() or not all(file.exists() for file in marian):
        return load(path)
    return Tokenizer(_read_marian(path, "target"))


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
    if {"[CLS]", "[SEP]"} <= vocabulary.keys():
        # Not for what is encoded here, but for others who read what is saved.
        tokenizer.post_processor = library.processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
        )
    return _with_special(tokenizer, vocabulary)


def _read_marian(
    folder: Path, side: Literal["source", "target"] = "source"
) -> "tokenizers.Tokenizer":
    """The pieces of one side; their ids are of both, unless the target has a file of its own."""
    apart = side == "target" and _setting(folder, "separate_vocabs", False)
    vocabulary = _read_vocabulary(folder / ("target_vocab.json" if apart else "vocab.json"))
    return read_pieces(folder / f"{side}.spm", vocabulary)


def _read_t5(folder: Path) -> "tokenizers.Tokenizer":
    """The pieces, and after them the names of gaps, the last first (Raffel et al. 2020, 3.1)."""
    path = folder / "tokenizer_config.json"
    gaps = _read_table(path).get("extra_ids", _GAPS) if path.exists() else _GAPS
    if type(gaps) is not int or not 0 <= gaps <= _MOST_GAPS:
        raise DataError(f"{path}: extra_ids must be from 0 to {_MOST_GAPS:,}, got {gaps!r}")
    names = [f"<extra_id_{number}>" for number in reversed(range(gaps))]
    return read_pieces(folder / "spiece.model", more=names)


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


FILES: Mapping[tuple[str, ...], Callable[[Path], "tokenizers.Tokenizer"]] = {
    ("tokenizer.json",): lambda folder: _read_json(folder / "tokenizer.json"),
    _MARIAN: _read_marian,
    ("vocab.json", "merges.txt"): _read_gpt2,
    ("vocab.txt",): _read_bert,
    ("spiece.model",): _read_t5,
    ("tokenizer.model",): lambda folder: read_pieces(folder / "tokenizer.model"),
}
"""What folders hold of a tokenizer: the first that is there whole is read."""
