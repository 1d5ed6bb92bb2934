"""Other people's folders as models of ours."""

import os
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from flax import linen as nn

from jaxformer import tokenizers
from jaxformer.config import ConfigError
from jaxformer.kernels import Kernel, reference
from jaxformer.pretrained import families
from jaxformer.pretrained.family import Family, canonical, read_config
from jaxformer.pretrained.files import Folder, Tensors, check_layers
from jaxformer.pretrained.hub import locate
from jaxformer.pretrained.models import make, nested, shapes_of
from jaxformer.pretrained.settings import number
from jaxformer.pretrained.subjects import Subject
from jaxformer.pretrained.table import Table, check_names, check_shapes, to_ours
from jaxformer.tokenizers import DataError, Tokenizer

_BESIDE = ("tokenizer_config.json", "target_vocab.json")
_TOKENIZER_LIMIT = 128 * 2**20


class Pretrained(NamedTuple):
    """A model with weights from elsewhere; `tokenizer` is None where the folder has none."""

    model: nn.Module
    params: dict[str, Any]
    tokenizer: Tokenizer | None


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    kernel: Kernel = reference,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Pretrained:
    """The model, parameters and tokenizer in `folder`, as `transformers` writes them.

    Read are config.json, model.safetensors (also in parts, with their index) and the tokenizer's
    files (SentencePiece's need the extra `subwords`). `architectures` in config.json decides the
    model: a `DecoderOnly`, `EncoderOnly`, `EncoderDecoder`, `MaskedLanguageModel` or `Classifier`.
    `params` are float32 numpy arrays, whatever the file has of F16, BF16 and F32; `dtype` is that
    of the computation. A decoder without an output of its own has that of its embedding. Where
    `folder` is the name of a model on a hub and no folder, it is downloaded (needs
    `huggingface_hub`).

    Raises `ConfigError` for what cannot be said here, naming the key and its value, and
    `DataError` for files that are damaged, lead out of the folder or hold other tensors than the
    model needs; no tensor is passed over in silence.
    """
    source = Folder(locate(folder))
    theirs = source.json("config.json")
    tensors = Tensors(source)
    try:
        family, subject, names = _subject(theirs, tensors, dtype)
        model = make(subject, kernel)
        params = _params(family.table(subject, theirs), model, tensors, names)
    except ConfigError as error:
        raise ConfigError(f"{source.path / 'config.json'}: {error}") from error
    except DataError as error:
        raise DataError(f"{source.path}: {error}") from error
    tokenizer = load_tokenizer(source)
    _check_fit(source, tokenizer, subject)
    return Pretrained(model, params, tokenizer)


def load_tokenizer(source: Folder) -> Tokenizer | None:
    """The tokenizer in the folder, None where it has no files of one."""
    return tokenizers.load(source.path) if _has_tokenizer(source) else None


def load_target_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | None:
    """The one that reads targets in `folder`, None where it has no files of a tokenizer.

    It is another one than that of `load_pretrained` in Marian's folders with two models of
    SentencePiece.
    """
    source = Folder(locate(folder))
    return tokenizers.load_target(source.path) if _has_tokenizer(source) else None


def _has_tokenizer(source: Folder) -> bool:
    """Whether there are files of a tokenizer; `DataError` unless all of them lie in the folder."""
    for names in tokenizers.FILES:
        if all(source.has(name) for name in names):
            for name in (*names, *filter(source.has, _BESIDE)):
                source.file(name, _TOKENIZER_LIMIT)
            return True
    return False


def _subject(
    theirs: dict[str, Any], tensors: Tensors, dtype: Literal["float32", "bfloat16"]
) -> tuple[Family, Subject, dict[str, str]]:
    """The family, what the folder holds, and the table's name -> the folder's of each tensor."""
    family, kind = families.find(theirs)
    config = replace(read_config(family, theirs), dtype=dtype)
    check_layers(config.num_encoder_layers + config.num_decoder_layers, tensors.shapes)
    names = canonical(family, tensors.shapes)
    head = tensors.shapes.get(names.get(family.head, ""), (0,))
    classes = number(family.head, head[0], int) if head else 0
    subject = Subject(kind, config, classes).completed()
    return family, family.adapt(subject, names), names


def _params(
    table: Table, model: nn.Module, tensors: Tensors, names: dict[str, str]
) -> dict[str, Any]:
    """The model's parameters; nothing is read before all names and shapes fit."""
    check_names(table, names)
    shapes = shapes_of(model)
    check_shapes(table, shapes, {name: tensors.shapes[names[name]] for name in names})
    return nested(to_ours(table, shapes, names, lambda name: tensors.read(names[name])))


def _check_fit(source: Folder, tokenizer: Tokenizer | None, subject: Subject) -> None:
    size = subject.config.source_vocab_size or subject.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > size:
        raise DataError(
            f"{source.path}: the tokenizer's ids end at {tokenizer.vocab_size - 1}, but the "
            f"model's vocabulary has {size}: they do not belong together"
        )
