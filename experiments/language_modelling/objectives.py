"""Causal and masked language modelling: the functions in which they differ, and their model."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax

from experiments.harness.training.flops import causal_flops, masked_flops, rows_and_length
from experiments.language_modelling.presets import LanguageConfig
from jaxformer.config import TransformerConfig
from jaxformer.nn.heads import MaskedLanguageModel
from jaxformer.nn.models import DecoderOnly
from jaxformer.text.data import MaskedStream, Stream, Tokens, iterate_once
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import Loss, causal_loss, masked_and_next_sentence_loss, masked_loss


class Objective(NamedTuple):
    """The model, its batches, its loss and its metric.

    `model` is a class of models, and `inputs(batch)` the arguments of its `__call__`.
    `loss(model, loss_chunk=...)` is minimised on the batches of `stream`; `measure` is reported of
    held-out text on batches of `iterate_once`. `iterate_labelled` gives held-out batches with all
    labels that `loss` needs. A step on a placed batch costs `flops(sizes, batch)`.
    """

    model: type[DecoderOnly] | type[MaskedLanguageModel]
    inputs: Callable[[Any], tuple[jax.Array, ...]]
    loss: Callable[..., Loss]
    measure: Callable[..., Loss]
    stream: Callable[[Tokens, Tokenizer, LanguageConfig], Stream | MaskedStream]
    iterate_once: Callable[[Tokens, Tokenizer, LanguageConfig, int], Iterator[Any]]
    iterate_labelled: Callable[[Tokens, Tokenizer, LanguageConfig, int], Iterator[Any]]
    flops: Callable[[TransformerConfig, Any], int]


def objective_of(config: LanguageConfig) -> Objective:
    """The objective that `config` names."""
    if config.objective == "masked":
        return _PAIRS if config.data.next_sentence else _MASKED
    return _CAUSAL


def _stream(tokens: Tokens, tokenizer: Tokenizer, config: LanguageConfig) -> Stream:
    data = config.data
    return Stream(
        tokens,
        batch_size=data.batch_size,
        seq_len=data.seq_len,
        seed=config.training.seed,
        isolate_documents=config.isolate_documents,
    )


def _iterate_once(
    tokens: Tokens, tokenizer: Tokenizer, config: LanguageConfig, stride: int
) -> Iterator[Any]:
    return iterate_once(
        tokens,
        batch_size=_rows(config),
        seq_len=config.data.seq_len,
        stride=stride,
        isolate_documents=config.isolate_documents,
    )


def _masked_stream(tokens: Tokens, tokenizer: Tokenizer, config: LanguageConfig) -> MaskedStream:
    data = config.data
    return _rows_of_masks(tokens, tokenizer, config, data.batch_size, data.next_sentence)


def _rows_of_masks(
    tokens: Tokens,
    tokenizer: Tokenizer,
    config: LanguageConfig,
    batch_size: int,
    next_sentence: bool,
) -> MaskedStream:
    data = config.data
    return MaskedStream(
        tokens,
        batch_size=batch_size,
        seq_len=data.seq_len,
        seed=config.training.seed,
        special=tokenizer.special,
        vocab_size=tokenizer.vocab_size,
        mask_prob=data.mask_prob,
        next_sentence=next_sentence,
    )


def _iterate_masked_once(
    tokens: Tokens,
    tokenizer: Tokenizer,
    config: LanguageConfig,
    stride: int,
    *,
    next_sentence: bool = False,
) -> Iterator[Any]:
    stream = _rows_of_masks(tokens, tokenizer, config, _rows(config), next_sentence)
    yield from stream.once()


def _rows(config: LanguageConfig) -> int:
    """The rows whose gradient one device computes at once: more might not fit into memory."""
    return -(-config.data.batch_size // config.training.parts)


_CAUSAL = Objective(
    model=DecoderOnly,
    inputs=lambda batch: (batch.tokens[:, :-1],),
    loss=causal_loss,
    measure=causal_loss,
    stream=_stream,
    iterate_once=_iterate_once,
    iterate_labelled=_iterate_once,
    flops=lambda sizes, batch: causal_flops(sizes, *rows_and_length(batch.loss_mask)),
)
_MASKED = Objective(
    model=MaskedLanguageModel,
    inputs=lambda batch: (
        batch.tokens,
        batch.padding_mask,
        batch.token_type_ids,
        batch.masked_positions,
    ),
    loss=masked_loss,
    measure=masked_loss,
    stream=_masked_stream,
    iterate_once=_iterate_masked_once,
    iterate_labelled=_iterate_masked_once,
    flops=lambda sizes, batch: masked_flops(
        sizes, *rows_and_length(batch.tokens), batch.masked_positions.shape[-1]
    ),
)
_PAIRS = _MASKED._replace(
    loss=masked_and_next_sentence_loss,
    iterate_labelled=partial(_iterate_masked_once, next_sentence=True),
)
