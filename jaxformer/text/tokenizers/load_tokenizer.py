"""Tokenizers from files: those trained here, and those published with a model's weights."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jaxformer import optional_dependencies
from jaxformer.errors import DataError
from jaxformer.storage import read_json, to_path
from jaxformer.text.tokenizers.folder_settings import FolderSettings, read_text
from jaxformer.text.tokenizers.languages import Languages
from jaxformer.text.tokenizers.sentencepiece import read_sentencepiece
from jaxformer.text.tokenizers.tokenizer import (
    ROLE_NAMES,
    Tokenizer,
    config_path,
    find_role,
)

if TYPE_CHECKING:
    import tokenizers

_MARIAN = ("source.spm", "target.spm", "vocab.json")

_EXTRA_IDS = 100

# Classes that say more than their tokenizer.json: how letters are changed, whether a space begins.
_BERT = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
_GPT2 = ("GPT2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer", "BartTokenizer")

# Words with the sign before them, single digits, signs, line feeds, other spaces (Qwen2).
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer in the file `path`, or in the folder `path` of a published model.

    A folder has the files of one of `TOKENIZER_FILES`: `tokenizer.json`, or two SentencePiece
    models and `vocab.json` (Marian), byte-level BPE (GPT-2), WordPiece (BERT), or a SentencePiece
    model (T5, M2M100). `tokenizer_config.json` and `special_tokens_map.json` name the roles of
    special tokens, further tokens, and the languages of a translator; `config.json` says how many
    ids the model has. For Marian this is the
    tokenizer of the source; `load_pair` gives the target's too. Raises `DataError` for
    files that are absent, damaged or do not fit together, and `MissingExtra` for SentencePiece
    models without `sentencepiece`.

    >>> from jaxformer.text import tokenizers
    >>> tokenizers.train_words(["a rose"], 10).save("words.json")
    >>> tokenizers.load("words.json").encode("a rose")
    [4, 5]
    """
    path = to_path(path)
    if not path.is_dir():
        named_roles = config_path(path)
        if not named_roles.exists():
            return Tokenizer(_read_json(path))
        settings = FolderSettings(path.parent, named_roles.name)
        languages = settings.config.get("languages")
        return Tokenizer(
            _read_json(path),
            settings.roles,
            Languages(**languages) if languages else None,
            settings.config.get("model_vocab_size"),
        )
    read = _reader(path)
    if read is None:
        raise DataError(
            f"{path}: a tokenizer's folder holds "
            f"{', or '.join(' and '.join(names) for names in TOKENIZER_FILES)}; this one does not"
        )
    return _of_folder(path, read, "vocab_size")


def _of_folder(
    folder: Path,
    read: Callable[[Path, FolderSettings], "tokenizers.Tokenizer"],
    vocab_size_key: str,
) -> Tokenizer:
    """The tokenizer that `read` gives, with the roles and the languages that the folder names.

    `vocab_size_key` is the key in config.json of the number of ids on the texts' side of the model.
    """
    settings = FolderSettings(folder)
    made = read(folder, settings)
    _clean_up_spaces(made, settings)
    model_vocab_size = settings.vocab_size(vocab_size_key)
    tokenizer = Tokenizer(made, settings.roles, None, model_vocab_size)
    languages = settings.languages(tokenizer)
    if languages is None:
        return tokenizer
    return Tokenizer(made, settings.roles, languages, model_vocab_size)


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` has all files of one of `TOKENIZER_FILES`, or tiktoken's."""
    return _reader(folder) is not None


def _reader(folder: Path) -> Callable[[Path, FolderSettings], "tokenizers.Tokenizer"] | None:
    for names, read in TOKENIZER_FILES.items():
        if all((folder / name).exists() for name in names):
            return read
    return _refuse_tiktoken if any(folder.glob("*.tiktoken")) else None


def load_pair(path: str | os.PathLike[str]) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of source and target; one object except in Marian's folders. See `load`."""
    path = Path(path)
    source = load(path)
    marian = (path / name for name in _MARIAN)
    if (path / "tokenizer.json").exists() or not all(file.exists() for file in marian):
        return source, source
    read_target = partial(_read_marian, side="target")
    return source, _of_folder(path, read_target, "decoder_vocab_size")


def digest(folder: str | os.PathLike[str]) -> str:
    """SHA-256 (hex) of the files of the tokenizers in `folder`: the same in all versions."""
    paths = sorted(to_path(folder).glob("*.json"), key=lambda path: path.name)
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _read_json(path: Path) -> "tokenizers.Tokenizer":
    library = optional_dependencies.load("tokenizers")
    text = read_text(path)
    try:
        return library.Tokenizer.from_str(text)
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not a whole tokenizer.json: {error}") from error


def _read_whole(folder: Path, settings: FolderSettings) -> "tokenizers.Tokenizer":
    """tokenizer.json; the settings of BERT's and GPT-2's classes replace parts of it."""
    tokenizer = _read_json(folder / "tokenizer.json")
    library = optional_dependencies.load("tokenizers")
    if settings.kind in _BERT and isinstance(
        tokenizer.normalizer, library.normalizers.BertNormalizer
    ):
        tokenizer.normalizer = library.normalizers.BertNormalizer(**_bert_options(settings))
    cut = tokenizer.pre_tokenizer
    if settings.kind in _GPT2 and isinstance(cut, library.pre_tokenizers.ByteLevel):
        cut.add_prefix_space = settings.option("add_prefix_space", False)
        tokenizer.pre_tokenizer = cut
    return tokenizer


def _clean_up_spaces(tokenizer: "tokenizers.Tokenizer", settings: FolderSettings) -> None:
    """Makes decoding remove the spaces before punctuation, if the folder asks for it.

    BPE keeps them, as in transformers (version 5).
    """
    library = optional_dependencies.load("tokenizers")
    asked = settings.option("clean_up_tokenization_spaces", False)
    if not asked or not tokenizer.decoder or isinstance(tokenizer.model, library.models.BPE):
        return
    joined = {" ' ": "'"} | {f" {end}": end for end in ("n't", "'m", "'s", "'ve", "'re")}
    pairs = ({f" {sign}": sign for sign in ".?!,"} | joined).items()
    steps = [tokenizer.decoder, library.decoders.Fuse()]
    steps += [library.decoders.Replace(before, after) for before, after in pairs]
    tokenizer.decoder = library.decoders.Sequence(steps)


def _read_gpt2(folder: Path, settings: FolderSettings) -> "tokenizers.Tokenizer":
    """Byte-level BPE with the byte alphabet of GPT-2 (Radford et al. 2019, 2.2) and its relatives.

    Qwen2 cuts texts into words by another rule; RoBERTa and BART put a text between two tokens.
    """
    library = optional_dependencies.load("tokenizers")
    vocabulary = _read_vocabulary(folder / "vocab.json")
    path = folder / "merges.txt"
    try:
        _, merges = library.models.BPE.read_file(str(folder / "vocab.json"), str(path))
        model = library.models.BPE(vocabulary, merges, unk_token=find_role("unk", vocabulary))
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not the merges of vocab.json: {error}") from error
    tokenizer, cut = library.Tokenizer(model), library.pre_tokenizers
    space = bool(settings.option("add_prefix_space", False))
    tokenizer.pre_tokenizer = cut.ByteLevel(add_prefix_space=space)
    if settings.kind in ("Qwen2Tokenizer", "GPTNeoXTokenizer"):
        tokenizer.normalizer = library.normalizers.NFC()
    if settings.kind == "Qwen2Tokenizer":
        words = cut.Split(library.Regex(_QWEN2), "isolated")
        tokenizer.pre_tokenizer = cut.Sequence([words, cut.ByteLevel(space, use_regex=False)])
    tokenizer.decoder = library.decoders.ByteLevel()
    roles = dict.fromkeys(name for names in ROLE_NAMES.values() for name in names)
    if settings.roles is not None:
        roles = dict.fromkeys(name for name in settings.roles.values() if name)
    tokenizer.add_special_tokens([name for name in roles if name in vocabulary])
    _add_tokens(tokenizer, folder, settings)
    _add_template(tokenizer, settings)
    return tokenizer


def _add_tokens(tokenizer: "tokenizers.Tokenizer", folder: Path, settings: FolderSettings) -> None:
    """Adds the folder's tokens that are not in its vocabulary, with their ids."""
    make = optional_dependencies.load("tokenizers").AddedToken
    for index in sorted(settings.added):
        token = dict(settings.added[index])
        name = token.pop("content", None)
        try:
            add = tokenizer.add_special_tokens if token.get("special") else tokenizer.add_tokens
            add([make(name, **token)])
        except TypeError as error:
            raise DataError(f"{folder}: the added token {index} is damaged: {error}") from error
        if tokenizer.token_to_id(name) != index:
            raise DataError(
                f"{folder}: the added token {name!r} has the id {index}, but after the vocabulary "
                f"it is {tokenizer.token_to_id(name)}: write tokenizer.json{_CONVERT}"
            )


def _add_template(tokenizer: "tokenizers.Tokenizer", settings: FolderSettings) -> None:
    """Makes encoding put special tokens around texts, as tokenizers of this kind do."""
    wanted = settings.roles or {}
    first, last = (
        wanted.get(role) or find_role(role, tokenizer.get_vocab()) for role in ("bos", "eos")
    )
    if settings.kind != "RobertaTokenizer":
        first = first if settings.option("add_bos_token", False) else None
        last = last if settings.option("add_eos_token", False) else None
    names = [name for name in (first, last) if name]
    if names:
        tokenizer.post_processor = optional_dependencies.load(
            "tokenizers"
        ).processors.TemplateProcessing(
            single=[*([first] if first else []), "$A", *([last] if last else [])],
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in dict.fromkeys(names)],
        )


def _read_vocabulary(path: Path) -> dict[str, int]:
    vocabulary = read_json(path)
    ids = vocabulary.values()
    if not all(type(i) is int for i in ids) or sorted(ids) != list(range(len(ids))):
        raise DataError(f"{path}: its {len(ids)} tokens must have the ids from 0, each once")
    return vocabulary


def _bert_options(settings: FolderSettings) -> dict[str, bool | None]:
    """The arguments of a `BertNormalizer`."""
    return {
        "handle_chinese_chars": settings.option("tokenize_chinese_chars", True),
        "strip_accents": settings.option("strip_accents", None),
        "lowercase": settings.option("do_lower_case", True),
    }


def _read_bert(folder: Path, settings: FolderSettings) -> "tokenizers.Tokenizer":
    """WordPiece with one token per line; the line number is the id (Devlin et al. 2019, 3)."""
    library = optional_dependencies.load("tokenizers")
    path, options = folder / "vocab.txt", _bert_options(settings)
    try:
        words = library.models.WordPiece.read_file(str(path))
        tokenizer = library.implementations.BertWordPieceTokenizer(words, **options)
        tokenizer = library.Tokenizer.from_str(tokenizer.to_str())
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not BERT's vocabulary of one token a line: {error}") from error
    _add_tokens(tokenizer, folder, settings)
    return tokenizer


def _read_marian(
    folder: Path, settings: FolderSettings, side: Literal["source", "target"] = "source"
) -> "tokenizers.Tokenizer":
    """The pieces of one side; both sides share the ids unless the target has a file of its own."""
    separate = side == "target" and settings.option("separate_vocabs", False)
    vocabulary = _read_vocabulary(folder / ("target_vocab.json" if separate else "vocab.json"))
    return _ending_in(read_sentencepiece(folder / f"{side}.spm", vocabulary), "</s>")


def _read_t5(folder: Path, settings: FolderSettings) -> "tokenizers.Tokenizer":
    """The pieces, then `<extra_id_99>` to `<extra_id_0>` (Raffel et al. 2020, 3.1)."""
    count = settings.config.get("extra_ids", _EXTRA_IDS)
    if type(count) is not int or count < 0:
        path = folder / "tokenizer_config.json"
        raise DataError(f"{path}: extra_ids must be a number from 0, got {count!r}")
    names = [f"<extra_id_{number}>" for number in reversed(range(count))]
    return _ending_in(read_sentencepiece(folder / "spiece.model", extra_tokens=names), "</s>")


def _read_m2m100(folder: Path, settings: FolderSettings) -> "tokenizers.Tokenizer":
    """The pieces, then the languages in the order of `additional_special_tokens`."""
    names = settings.more_special()
    vocabulary = _read_vocabulary(folder / "vocab.json")
    return read_sentencepiece(folder / _PIECES, vocabulary, names)


def _ending_in(tokenizer: "tokenizers.Tokenizer", name: str) -> "tokenizers.Tokenizer":
    """`tokenizer`, which now ends each text with the token `name`."""
    processors = optional_dependencies.load("tokenizers").processors
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["$A", name], special_tokens=[(name, tokenizer.token_to_id(name))]
    )
    return tokenizer


_CONVERT = (
    ", which transformers does: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


def _refuse(folder: Path, settings: FolderSettings) -> "tokenizers.Tokenizer":
    raise DataError(
        f"{folder} has its tokenizer only in a model file of SentencePiece, which is read for T5, "
        f"Marian and M2M100: give it a tokenizer.json{_CONVERT}"
    )


def _refuse_tiktoken(folder: Path, settings: FolderSettings) -> "tokenizers.Tokenizer":
    name = next(folder.glob("*.tiktoken")).name
    raise DataError(
        f"{folder} has its tokenizer only in {name}, a vocabulary of tiktoken, which is not read: "
        f"give it a tokenizer.json{_CONVERT}"
    )


_PIECES = "sentencepiece.bpe.model"
TOKENIZER_FILES: Mapping[
    tuple[str, ...], Callable[[Path, FolderSettings], "tokenizers.Tokenizer"]
] = {
    ("tokenizer.json",): _read_whole,
    _MARIAN: _read_marian,
    (_PIECES, "vocab.json"): _read_m2m100,
    ("vocab.json", "merges.txt"): _read_gpt2,
    ("vocab.txt",): _read_bert,
    ("spiece.model",): _read_t5,
    ("tokenizer.model",): _refuse,
    (_PIECES,): _refuse,
}
"""The files of a tokenizer in a folder, and what reads them; the first complete set is read."""
