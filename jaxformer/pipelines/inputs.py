"""Checks of the inputs of pipelines: a loaded model, one text or several, numbers."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from jaxformer.config import TransformerConfig
from jaxformer.decoding import LogitsConfig
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier
from jaxformer.nn.models import DecoderOnly, EncoderDecoder, EncoderOnly
from jaxformer.pretrained.loaded import Loaded
from jaxformer.text.tokenizers import Template, Tokenizer, check_list
from jaxformer.training.parameters import flatten

Texts = Iterable[str]
Prompt = str | Sequence[int]
"""A text, or the ids of one, such as a chat template's with its special tokens."""
Prompts = Iterable[Prompt]

_HEADS = (Classifier, MaskedLanguageModel, SpanPredictor, TokenClassifier)
_MODELS = (DecoderOnly, EncoderDecoder, EncoderOnly, *_HEADS)
# The pipelines that take a model.
_PIPELINES: dict[type, str] = {
    DecoderOnly: "complete, score or embed",
    EncoderDecoder: "translate",
    EncoderOnly: "embed",
    MaskedLanguageModel: "fill_mask or embed",
}


def unwrapped(model: Any) -> Any:
    """The model itself, or that inside `Ensemble` or `Patched`, also one in another."""
    return unwrapped(model.model) if hasattr(model, "model") else model


def check_inputs(loaded: Any, texts: Any, *kinds: type) -> tuple[list[Any], Tokenizer, Tokenizer]:
    """`texts`, one or several, in a list; the tokenizers of source and target.

    Raises `ConfigError` unless `loaded` is a `Loaded` with a model of `kinds` and tokenizers that
    fit it, `DataError` for no texts.
    """
    if isinstance(loaded, str | os.PathLike):
        raise ConfigError(f"the model is the path {str(loaded)!r}: call jf.load(path) first")
    if not isinstance(loaded, Loaded):
        raise ConfigError(
            f"the model is a {type(loaded).__name__}, but must be what jf.load(folder) returns, or "
            "jf.Loaded(model, params, tokenizer)"
        )
    check_model(loaded.model, *kinds)
    config = loaded.model.config
    source, target = loaded.require_tokenizer(), loaded.require_target_tokenizer()
    source.check_fits(config.source_vocab_size or config.vocab_size)
    target.check_fits(config.vocab_size)
    check_params(loaded.params)
    if isinstance(texts, str):
        return [texts], source, target
    check_list("texts", texts)
    texts = list(texts)
    if not texts:
        raise DataError("the list of texts is empty: give at least one text")
    return texts, source, target


def unwrap_single(texts: Any, results: Any) -> Any:
    """`results`, or the only one where `texts` is one string."""
    return results[0] if isinstance(texts, str) else results


def check_model(model: Any, *kinds: type) -> None:
    """Raises `ConfigError` for one of the package's models that is of none of `kinds`."""
    body = unwrapped(model)
    if not isinstance(body, nn.Module) or isinstance(body, _MODELS) and not isinstance(body, kinds):
        uses = _PIPELINES.get(type(body))
        raise ConfigError(
            f"the model has the class {type(body).__name__}, but this needs "
            f"{' or '.join(kind.__name__ for kind in kinds)}: "
            + (f"use {uses}, or load another model" if uses else "give a model of that class")
        )


def check_params(params: Any) -> None:
    """Raises `ConfigError`, with the parameter's name, for one that is no array of JAX or numpy."""
    wrong = [x for x in jax.tree.leaves(params) if not isinstance(getattr(x, "dtype", 0), np.dtype)]
    if wrong:
        name, leaf = next((name, x) for name, x in flatten(params).items() if x is wrong[0])
        raise ConfigError(
            f"the parameter {name} is a {type(leaf).__module__}.{type(leaf).__name__}, but "
            "must be an array of JAX or numpy: give the tree that model.init or jf.load returns"
        )


def check_texts(texts: Iterable[str]) -> list[str]:
    """`texts` in a list; `DataError` for what is no string."""
    texts = list(texts)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise DataError(
                f"text {number} of {len(texts)} is a {type(text).__name__}, but must be a string"
            )
    return texts


def check_id(name: str, token: int, vocab_size: int) -> None:
    """Raises `ConfigError` for a token id outside the model's vocabulary."""
    if not 0 <= token < vocab_size:
        raise ConfigError(
            f"{name}={token}, but the model's token ids are 0 to {vocab_size - 1}: give one of them"
        )


def suppressed_ids(
    model_config: TransformerConfig, tokenizer: Tokenizer, config: LogitsConfig
) -> tuple[int, ...]:
    """The ids that are never written: `config.suppress_tokens`, and every id without a token."""
    unknown = range(tokenizer.vocab_size, model_config.vocab_size)
    return *config.suppress_tokens, *(x for x in unknown if x not in config.suppress_tokens)


def check_count(name: str, value: Any, most: int | None = None) -> None:
    """Raises `ConfigError` unless `value` is an integer from 1 to `most` (None: any)."""
    limits = "at least 1" if most is None else f"1 to {most}"
    if not isinstance(value, int | np.integer) or value < 1 or (most is not None and value > most):
        raise ConfigError(f"{name}={value!r}, but it must be an integer, {limits}")


def check_lengths(texts: Sequence[Sequence[int]], max_len: int) -> None:
    """Raises `DataError`, naming the first one, for texts of more than `max_len` tokens."""
    long = [i for i, ids in enumerate(texts) if len(ids) > max_len]
    if long:
        raise DataError(
            f"{len(long)} of {len(texts)} texts are longer than max_len={max_len} tokens, the "
            f"first is text {long[0] + 1} with {len(texts[long[0]])}: split them"
        )


def bos_eos(tokenizer: Tokenizer) -> Template:
    """BOS and EOS of the vocabulary, as far as it has them."""
    first, last = (() if x is None else (x,) for x in tokenizer.special[1:3])
    return Template(first, last)
