"""Folders of `transformers` as models of this package."""

import os
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from flax import linen as nn
from flax.traverse_util import unflatten_dict

from jaxformer.errors import ConfigError, DataError
from jaxformer.ops.attention import AttentionFn, reference
from jaxformer.pretrained import families
from jaxformer.pretrained.config_mapping import parse_number
from jaxformer.pretrained.family import Family, canonical_names, read_config
from jaxformer.pretrained.hf_folder import HFFolder, Tensors, check_layers, locate
from jaxformer.pretrained.model_specs import ModelSpec, make_model, param_shapes
from jaxformer.pretrained.weight_map import WeightMap, check_names, check_shapes, to_jax
from jaxformer.text import tokenizers
from jaxformer.text.tokenizers import Tokenizer

_TOKENIZER_OPTIONS = ("tokenizer_config.json", "target_vocab.json")
_TOKENIZER_LIMIT = 128 * 2**20


class Pretrained(NamedTuple):
    """A model with its weights and tokenizer."""

    model: nn.Module
    params: dict[str, Any]
    """Float32 numpy arrays in nested dicts."""
    tokenizer: Tokenizer | None
    """None where the folder has no tokenizer."""


def load_pretrained(
    folder: str | os.PathLike[str],
    *,
    attention_fn: AttentionFn = reference,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Pretrained:
    """The model, parameters and tokenizer in `folder`, as `transformers` writes them.

    Reads config.json, model.safetensors (also in several files with an index) and the tokenizer's
    files (those of SentencePiece need the extra `subwords`). `architectures` in config.json decides
    the model: a `DecoderOnly`, `EncoderOnly`, `EncoderDecoder`, `MaskedLanguageModel` or
    `Classifier`. Weights may be stored as F16, BF16 or F32; `params` are float32. `dtype` is that
    of the computation. A decoder without an output layer gets the transpose of its embedding. If
    there is no such folder, `folder` is the name of a model on the hub and is downloaded (needs
    `huggingface_hub`).

    Raises `ConfigError`, naming the key and its value, for what is not supported, and `DataError`
    for files that are damaged, lead out of the folder, or do not have exactly the tensors that the
    model needs.
    """
    source = HFFolder(locate(folder))
    hf = source.json("config.json")
    tensors = Tensors(source)
    try:
        family, spec, names = _read_spec(hf, tensors, dtype)
        model = make_model(spec, attention_fn)
        params = _read_params(family.weight_map(spec, hf), model, tensors, names)
    except ConfigError as error:
        raise ConfigError(f"{source.path / 'config.json'}: {error}") from error
    except DataError as error:
        raise DataError(f"{source.path}: {error}") from error
    tokenizer = tokenizers.load(source.path) if _has_tokenizer(source) else None
    if tokenizer is not None:
        size = spec.config.source_vocab_size or spec.config.vocab_size
        check_tokenizer(source.path, tokenizer, size)
    return Pretrained(model, params, tokenizer)


def load_target_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer of the target in `folder`, None where the folder has no tokenizer.

    It differs from that of `load_pretrained` in Marian's folders with two SentencePiece models.
    """
    source = HFFolder(locate(folder))
    return tokenizers.load_target(source.path) if _has_tokenizer(source) else None


def check_tokenizer(folder: str | os.PathLike[str], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises `DataError` if the tokenizer of `folder` has more ids than the model."""
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{folder}: the tokenizer's ids end at {tokenizer.vocab_size - 1}, but the model's "
            f"vocabulary has {vocab_size}: put the model's own tokenizer there"
        )


def _has_tokenizer(source: HFFolder) -> bool:
    """Whether there are files of a tokenizer; `DataError` unless all of them are in the folder."""
    for names in tokenizers.TOKENIZER_FILES:
        if all(source.has(name) for name in names):
            for name in (*names, *filter(source.has, _TOKENIZER_OPTIONS)):
                source.file(name, _TOKENIZER_LIMIT)
            return True
    return False


def _read_spec(
    hf: dict[str, Any], tensors: Tensors, dtype: Literal["float32", "bfloat16"]
) -> tuple[Family, ModelSpec, dict[str, str]]:
    """The family, the spec, and the weight map's name -> the folder's of each tensor."""
    family, kind = families.find(hf)
    config = replace(read_config(family, hf), dtype=dtype)
    check_layers(config.num_encoder_layers + config.num_decoder_layers, tensors.shapes)
    names = canonical_names(family, tensors.shapes)
    head = tensors.shapes.get(names.get(family.classifier_tensor, ""), (0,))
    classes = parse_number(family.classifier_tensor, head[0], int) if head else 0
    spec = ModelSpec(kind, config, classes).completed()
    return family, family.adapt(spec, names), names


def _read_params(
    weight_map: WeightMap, model: nn.Module, tensors: Tensors, names: dict[str, str]
) -> dict[str, Any]:
    """The model's parameters; no tensor is read before all names and shapes fit."""
    check_names(weight_map, names)
    shapes = param_shapes(model)
    check_shapes(weight_map, shapes, {name: tensors.shapes[names[name]] for name in names})
    leaves = to_jax(weight_map, shapes, names, lambda name: tensors.read(names[name]))
    return unflatten_dict(leaves, sep="/")
