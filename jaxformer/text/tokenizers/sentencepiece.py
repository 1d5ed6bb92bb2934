"""Tokenizers of the `tokenizers` library from SentencePiece's files (Kudo and Richardson 2018)."""

import math
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
_UNIGRAM, _BPE = 1, 2
# More spaces than any text begins with.
_ALL_SPACES = 2**16


def read_sentencepiece(
    path: Path,
    vocabulary: Mapping[str, int] | None = None,
    extra_tokens: Sequence[str] = (),
) -> "tokenizers.Tokenizer":
    """The tokenizer in the SentencePiece model file `path`.

    `vocabulary` gives the ids of the pieces; None numbers them as in the file. The special tokens
    `extra_tokens` follow. Pieces that are not in `vocabulary` are not used. Tokens that are only
    in `vocabulary`, such as the pieces of another language, are decoded; a text gives them only
    where it would give the unknown token. Names of languages such as ">>fra<<" are tokens wherever
    they stand.

    Texts are cut as by SentencePiece, with two exceptions: combining marks after a character that
    the model's table replaces are lost, and a unigram model reads the names of its unknown token
    and of bytes, such as "<0x41>", as these tokens.

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
    whole = [x for x in vocabulary if kinds.get(x) == _USER_DEFINED or _is_language(x)]
    special = [x for x in vocabulary if kinds.get(x) in (_UNKNOWN, _CONTROL) or x in roles]
    foreign = vocabulary.keys() - kinds.keys() - {*whole, *special}
    # No text contains a name with a space before it: SentencePiece writes spaces as "▁".
    names = {" " + x if x in foreign else x: i for x, i in vocabulary.items()}
    scores = {p.piece: p.score for p in model.pieces if p.type == _NORMAL and p.piece in vocabulary}
    make = _unigram if model.trainer_spec.model_type == _UNIGRAM else _bpe
    try:
        tokenizer = library.Tokenizer(make(names, scores, unknown, model))
        tokenizer.normalizer = _normalizer(library, model.normalizer_spec)
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not a supported model: {error}") from error
    tokenizer.decoder = _decoder(library, model.normalizer_spec)
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
    names, kind = [piece.piece for piece in model.pieces], model.trainer_spec.model_type
    kinds = [piece.type for piece in model.pieces]
    wrong = {
        f"{kinds.count(_UNKNOWN)} unknown pieces instead of 1": kinds.count(_UNKNOWN) != 1,
        "pieces that occur twice": len(set(names)) < len(names),
        "pieces without a text or a finite score": not all(
            piece.piece and math.isfinite(piece.score) for piece in model.pieces
        ),
        "unused pieces": _UNUSED in kinds,
        f"model_type={kind}, only unigram (1) and BPE (2) are supported": kind
        not in (_UNIGRAM, _BPE),
        "treat_whitespace_as_suffix": model.trainer_spec.treat_whitespace_as_suffix,
        "no escape_whitespaces": not model.normalizer_spec.escape_whitespaces,
    }
    reasons = [reason for reason, is_wrong in wrong.items() if is_wrong]
    if reasons:
        raise DataError(f"{path}: not a supported model: it has {', '.join(reasons)}")
    return model


def _unigram(
    vocabulary: Mapping[str, int], scores: Mapping[str, float], unknown: str, model: Any
) -> "tokenizers.models.Unigram":
    ordered = sorted(vocabulary, key=lambda name: vocabulary[name])
    return optional_dependencies.load("tokenizers").models.Unigram(
        [(name, scores.get(name, 0.0)) for name in ordered],
        unk_id=vocabulary[unknown],
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _bpe(
    vocabulary: Mapping[str, int], scores: Mapping[str, float], unknown: str, model: Any
) -> "tokenizers.models.BPE":
    """Merges two neighbours wherever they make a piece, those with the highest score first."""
    merges = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merged = {left + right for _, left, right in merges}
    unmerged = [piece for piece in scores if len(piece) > 1 and piece not in merged]
    if unmerged:
        raise DataError(f"the vocabulary lacks the two parts of the piece {unmerged[0]!r}")
    return optional_dependencies.load("tokenizers").models.BPE(
        dict(vocabulary),
        [(left, right) for _, left, right in sorted(merges)],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _normalizer(library: Any, spec: Any) -> "tokenizers.normalizers.Sequence":
    kinds = library.normalizers
    steps = []
    if spec.precompiled_charsmap:
        steps.append(kinds.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(kinds.Replace(library.Regex(r"\A +| +\z"), ""))
        steps.append(kinds.Replace(library.Regex(" {2,}"), " "))
    steps.append(kinds.Replace(" ", SPACE))
    if spec.add_dummy_prefix:
        steps.append(kinds.Prepend(SPACE))
    return kinds.Sequence(steps)


def _decoder(library: Any, spec: Any) -> "tokenizers.decoders.Sequence":
    kinds = library.decoders
    steps = [
        kinds.Replace(" ", ""),
        kinds.Replace(SPACE, " "),
        kinds.ByteFallback(),
        kinds.Fuse(),
    ]
    leading = _ALL_SPACES if spec.remove_extra_whitespaces else int(spec.add_dummy_prefix)
    if leading:
        steps.append(kinds.Strip(" ", leading, 0))
    return kinds.Sequence(steps)


def _is_language(name: str) -> bool:
    return name.startswith(">>") and name.endswith("<<")
