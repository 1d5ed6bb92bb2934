"""Tokenizers of the `tokenizers` library from SentencePiece's files (Kudo and Richardson 2018)."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer import extras
from jaxformer.tokenizers.special import NAMES, SPACE
from jaxformer.tokenizers.tokenizer import DataError

if TYPE_CHECKING:
    import tokenizers

# The numbers that stand for these in a model file.
_NORMAL, _UNKNOWN, _CONTROL, _DEFINED, _UNUSED = 1, 2, 3, 4, 5
_UNIGRAM, _BPE = 1, 2
# Of characters; the trainer's own limit is 16.
_LONGEST = 1_000
# Of spaces that are taken off the beginning of a text where all are.
_ALL = 2**16


def read_pieces(
    path: Path, vocabulary: Mapping[str, int] | None = None, more: Sequence[str] = ()
) -> "tokenizers.Tokenizer":
    """The tokenizer in the model file `path`, with the ids of `vocabulary` if one is given.

    The special tokens `more` follow. A piece that `vocabulary` lacks is none, so that a text is
    cut into others. What only `vocabulary` has, such as the pieces of another language, is decoded,
    but comes out of a text only where it would be unknown; names of languages such as ">>fra<<"
    come out wherever they stand. Texts are cut as SentencePiece cuts them, but for two cases: marks
    that combine with a character which the model's table replaces are lost, and a unigram model
    reads the names of its unknown and of bytes, such as "<0x41>", as what they name.

    Raises `DataError` for files that are damaged or of another kind, and `MissingExtra` without
    `sentencepiece`.
    """
    library = extras.load("tokenizers")
    model = _parse(path)
    kinds = {piece.piece: piece.type for piece in model.pieces}
    vocabulary = vocabulary or {name: i for i, name in enumerate(kinds)}
    unknown = next(name for name, kind in kinds.items() if kind == _UNKNOWN)
    if unknown not in vocabulary:
        raise DataError(f"{path}: vocab.json has no {unknown!r}, which stands for the unknown")
    roles = {name for names in NAMES.values() for name in names} - kinds.keys()
    apart = [x for x in vocabulary if kinds.get(x) == _DEFINED or _is_language(x)]
    special = [x for x in vocabulary if kinds.get(x) in (_UNKNOWN, _CONTROL) or x in roles]
    foreign = vocabulary.keys() - kinds.keys() - {*apart, *special}
    # With a space before it a name is in no text: by then its spaces are written otherwise.
    names = {" " + x if x in foreign else x: i for x, i in vocabulary.items()}
    scores = {p.piece: p.score for p in model.pieces if p.type == _NORMAL and p.piece in vocabulary}
    make = _unigram if model.trainer_spec.model_type == _UNIGRAM else _bpe
    try:
        tokenizer = library.Tokenizer(make(names, scores, unknown, model))
        tokenizer.normalizer = _normalizer(library, model.normalizer_spec)
    except Exception as error:  # the library has no narrower class
        raise DataError(f"{path}: not a model that can be used: {error}") from error
    tokenizer.decoder = _decoder(library, model.normalizer_spec)
    tokenizer.add_tokens([library.AddedToken(name, normalized=False) for name in apart])
    tokenizer.add_special_tokens([*special, *more])
    return tokenizer


def _parse(path: Path) -> Any:
    """The model file, as its format's own library reads it."""
    library = extras.load("sentencepiece.sentencepiece_model_pb2")
    try:
        model = library.ModelProto.FromString(path.read_bytes())
    except Exception as error:  # the library's class is that of another package
        raise DataError(f"{path}: not a whole model of SentencePiece: {error}") from error
    pieces, kind = model.pieces, model.trainer_spec.model_type
    reason = None
    if sum(piece.type == _UNKNOWN for piece in pieces) != 1:
        reason = f"{len(pieces)} pieces, of which not just one stands for the unknown"
    elif len({piece.piece for piece in pieces}) < len(pieces):
        reason = "a piece stands there twice"
    elif not all(math.isfinite(p.score) and 0 < len(p.piece) <= _LONGEST for p in pieces):
        reason = f"a piece of more than {_LONGEST:,} characters, or with a score that is no number"
    elif any(piece.type == _UNUSED for piece in pieces):
        reason = "a piece is marked as unused, which is not known here"
    elif kind not in (_UNIGRAM, _BPE):
        reason = f"model_type={kind}, but only unigram (1) and BPE (2) are read"
    elif model.trainer_spec.treat_whitespace_as_suffix:
        reason = "treat_whitespace_as_suffix is set, which is not known here"
    elif not model.normalizer_spec.escape_whitespaces:
        reason = "escape_whitespaces is not set, which is not known here"
    if reason is not None:
        raise DataError(f"{path}: not a model that can be used: {reason}")
    return model


def _unigram(
    vocabulary: Mapping[str, int], scores: Mapping[str, float], unknown: str, model: Any
) -> "tokenizers.models.Unigram":
    ordered = sorted(vocabulary, key=lambda name: vocabulary[name])
    return extras.load("tokenizers").models.Unigram(
        [(name, scores.get(name, 0.0)) for name in ordered],
        unk_id=vocabulary[unknown],
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _bpe(
    vocabulary: Mapping[str, int], scores: Mapping[str, float], unknown: str, model: Any
) -> "tokenizers.models.BPE":
    """Any two neighbours that make a piece are merged, those of the highest score first."""
    merges = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    made = {left + right for _, left, right in merges}
    unmade = [piece for piece in scores if len(piece) > 1 and piece not in made]
    if unmade:
        raise DataError(f"the vocabulary lacks what {unmade[0]!r} is merged of")
    return extras.load("tokenizers").models.BPE(
        dict(vocabulary),
        [(left, right) for _, left, right in sorted(merges)],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )


def _normalizer(library: Any, said: Any) -> "tokenizers.normalizers.Sequence":
    kinds = library.normalizers
    steps = []
    if said.precompiled_charsmap:
        steps.append(kinds.Precompiled(said.precompiled_charsmap))
    if said.remove_extra_whitespaces:
        steps.append(kinds.Replace(library.Regex(r"\A +| +\z"), ""))
        steps.append(kinds.Replace(library.Regex(" {2,}"), " "))
    steps.append(kinds.Replace(" ", SPACE))
    if said.add_dummy_prefix:
        steps.append(kinds.Prepend(SPACE))
    return kinds.Sequence(steps)


def _decoder(library: Any, said: Any) -> "tokenizers.decoders.Sequence":
    kinds = library.decoders
    steps = [
        kinds.Replace(" ", ""),
        kinds.Replace(SPACE, " "),
        kinds.ByteFallback(),
        kinds.Fuse(),
    ]
    leading = _ALL if said.remove_extra_whitespaces else int(said.add_dummy_prefix)
    if leading:
        steps.append(kinds.Strip(" ", leading, 0))
    return kinds.Sequence(steps)


def _is_language(name: str) -> bool:
    return name.startswith(">>") and name.endswith("<<")
