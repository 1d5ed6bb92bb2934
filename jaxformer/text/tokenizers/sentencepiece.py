"""Tokenizers of the `tokenizers` library from SentencePiece's files (Kudo and Richardson 2018)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer import optional_dependencies
from jaxformer.errors import DataError
from jaxformer.text.tokenizers.tokenizer import ROLE_NAMES, SPACE

if TYPE_CHECKING:
    import tokenizers

# Types of pieces and of models in a model file.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_UNIGRAM = 1
# More spaces than any text begins with.
_ALL_SPACES = 2**16


def read_sentencepiece(
    path: Path,
    vocabulary: Mapping[str, int] | None = None,
    extra_tokens: Sequence[str] = (),
) -> "tokenizers.Tokenizer":
    """The tokenizer in the SentencePiece model file `path`, a unigram model.

    `vocabulary` gives the ids of the pieces; None numbers them as in the file. The special tokens
    `extra_tokens` follow. Pieces that are not in `vocabulary` are not used. Tokens that are only
    in `vocabulary`, such as the pieces of another language, are decoded; a text gives them only
    where it would give the unknown token. Names of languages such as ">>fra<<" are tokens wherever
    they stand.

    Texts are cut as by SentencePiece, with three exceptions: combining marks after a character that
    the model's table replaces are lost; the names of the unknown token and of bytes, such as
    "<0x41>", are read as these tokens; and at a piece of the user (`user_defined_symbols`) a text
    is cut as by transformers, so that the parts before and after it are texts of their own.

    Raises `DataError` for files that are damaged or of another kind, and `MissingExtra` without
    `sentencepiece`.
    """
    library = optional_dependencies.load("tokenizers")
    model = _parse(path)
    kinds = {piece.piece: piece.type for piece in model.pieces}
    vocabulary = vocabulary or {name: i for i, name in enumerate(kinds)}
    unknown = next(name for name, kind in kinds.items() if kind == _UNKNOWN)
    if unknown not in vocabulary:
        raise DataError(f"{path}: vocab.json has no {unknown!r}, the unknown token")
    roles = {name for names in ROLE_NAMES.values() for name in names} - kinds.keys()
    languages = {name for name in vocabulary if name.startswith(">>") and name.endswith("<<")}
    whole = [x for x in vocabulary if kinds.get(x) == _USER_DEFINED or x in languages]
    special = [x for x in vocabulary if kinds.get(x) in (_UNKNOWN, _CONTROL) or x in roles]
    foreign = vocabulary.keys() - kinds.keys() - {*whole, *special}
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _NORMAL}
    # No text contains a name with a space before it: SentencePiece writes spaces as "▁".
    pieces = [
        (" " + name if name in foreign else name, scores.get(name, 0.0))
        for name in sorted(vocabulary, key=lambda name: vocabulary[name])
    ]
    try:
        tokenizer = library.Tokenizer(
            library.models.Unigram(
                pieces,
                unk_id=vocabulary[unknown],
                byte_fallback=model.trainer_spec.byte_fallback,
            )
        )
        tokenizer.normalizer = _normalizer(library.normalizers, model.normalizer_spec)
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not a supported model: {error}") from error
    tokenizer.decoder = _decoder(library.decoders, model.normalizer_spec)
    tokenizer.add_tokens([library.AddedToken(name, normalized=False) for name in whole])
    tokenizer.add_special_tokens([*special, *extra_tokens])
    return tokenizer


def _parse(path: Path) -> Any:
    """The contents of the model file; raises `DataError` for a model that is not supported."""
    library = optional_dependencies.load("sentencepiece.sentencepiece_model_pb2")
    try:
        model = library.ModelProto.FromString(path.read_bytes())
    except Exception as error:  # a class of protobuf, which is not a dependency
        raise DataError(f"{path}: not a whole model of SentencePiece: {error}") from error
    kinds = [piece.type for piece in model.pieces]
    wrong = {
        f"{kinds.count(_UNKNOWN)} unknown pieces instead of 1": kinds.count(_UNKNOWN) != 1,
        "unused pieces": _UNUSED in kinds,
        "another model_type than unigram": model.trainer_spec.model_type != _UNIGRAM,
        "treat_whitespace_as_suffix": model.trainer_spec.treat_whitespace_as_suffix,
        "no escape_whitespaces": not model.normalizer_spec.escape_whitespaces,
    }
    reasons = [reason for reason, is_wrong in wrong.items() if is_wrong]
    if reasons:
        raise DataError(
            f"{path}: not a supported model: it has {', '.join(reasons)}; give the folder a "
            "tokenizer.json, which the save_pretrained of a fast tokenizer of transformers writes"
        )
    return model


def _normalizer(kinds: Any, spec: Any) -> "tokenizers.normalizers.Sequence":
    regex = optional_dependencies.load("tokenizers").Regex
    steps = []
    if spec.precompiled_charsmap:
        steps.append(kinds.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(kinds.Replace(regex(r"\A +| +\z"), ""))
        steps.append(kinds.Replace(regex(" {2,}"), " "))
    steps.append(kinds.Replace(" ", SPACE))
    if spec.add_dummy_prefix:
        steps.append(kinds.Prepend(SPACE))
    return kinds.Sequence(steps)


def _decoder(kinds: Any, spec: Any) -> "tokenizers.decoders.Sequence":
    steps = [kinds.Replace(" ", ""), kinds.Replace(SPACE, " "), kinds.ByteFallback(), kinds.Fuse()]
    leading = _ALL_SPACES if spec.remove_extra_whitespaces else int(spec.add_dummy_prefix)
    if leading:
        steps.append(kinds.Strip(" ", leading, 0))
    return kinds.Sequence(steps)
