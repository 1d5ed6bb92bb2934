"""What can be learned of a text, each as the functions that differ."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from experiments.language_modelling.presets import LanguageConfig
from experiments.planning import causal_flops, masked_flops, rows_and_length
from jaxformer.config import TransformerConfig
from jaxformer.data import MaskedStream, Stream, Tokens, cover, cover_masked
from jaxformer.heads import MaskedLanguageModel
from jaxformer.losses import Loss, causal_loss, masked_and_next_sentence_loss, masked_loss
from jaxformer.models import DecoderOnly
from jaxformer.tokenizers import Tokenizer


class Objective(NamedTuple):
    """How a model is made, fed and judged.

    `model` is called as its class is, `inputs` gives what its `__call__` takes of a batch;
    `loss(model, head=...)` is learned, `measure` is reported of held-out text; `stream` and
    `cover` give the batches of the one and of the other; a step on a placed batch costs
    `flops(sizes, batch)`.
    """

    model: Callable[..., nn.Module]
    inputs: Callable[[Any], tuple[jax.Array, ...]]
    loss: Callable[..., Loss]
    measure: Callable[..., Loss]
    stream: Callable[[Tokens, Tokenizer, LanguageConfig], Stream | MaskedStream]
    cover: Callable[[Tokens, Tokenizer, LanguageConfig, int], Iterator[Any]]
    flops: Callable[[TransformerConfig, Any], int]


def objective(config: LanguageConfig) -> Objective:
    """The objective that `config` names."""
    if config.objective == "masked":
        return _PAIRS if config.data.pairs else _MASKED
    return _CAUSAL


def _stream(tokens: Tokens, tokenizer: Tokenizer, config: LanguageConfig) -> Stream:
    data = config.data
    return Stream(
        tokens,
        rows=data.rows,
        length=data.length,
        seed=config.training.seed,
        separate=config.separate,
    )


def _cover(
    tokens: Tokens, tokenizer: Tokenizer, config: LanguageConfig, stride: int
) -> Iterator[Any]:
    return cover(
        tokens,
        rows=_rows(config),
        length=config.data.length,
        stride=stride,
        separate=config.separate,
    )


def _masked_stream(tokens: Tokens, tokenizer: Tokenizer, config: LanguageConfig) -> MaskedStream:
    data = config.data
    return MaskedStream(
        tokens,
        rows=data.rows,
        length=data.length,
        seed=config.training.seed,
        special=tokenizer.special,
        vocab_size=tokenizer.vocab_size,
        rate=data.rate,
        pairs=data.pairs,
    )


def _masked_cover(
    tokens: Tokens, tokenizer: Tokenizer, config: LanguageConfig, stride: int
) -> Iterator[Any]:
    data = config.data
    return cover_masked(
        tokens,
        rows=_rows(config),
        length=data.length,
        seed=config.training.seed,
        special=tokenizer.special,
        vocab_size=tokenizer.vocab_size,
        rate=data.rate,
    )


def _rows(config: LanguageConfig) -> int:
    """As many as are differentiated at once: more might not fit into memory."""
    return config.data.rows // config.training.accumulation


_CAUSAL = Objective(
    model=DecoderOnly,
    inputs=lambda batch: (batch.tokens[:, :-1],),
    loss=causal_loss,
    measure=causal_loss,
    stream=_stream,
    cover=_cover,
    flops=lambda sizes, batch: causal_flops(sizes, *rows_and_length(batch.valid)),
)
_MASKED = Objective(
    model=MaskedLanguageModel,
    inputs=lambda batch: (batch.tokens, batch.present, batch.types, batch.at),
    loss=masked_loss,
    measure=masked_loss,
    stream=_masked_stream,
    cover=_masked_cover,
    flops=lambda sizes, batch: masked_flops(
        sizes, *rows_and_length(batch.tokens), batch.at.shape[-1]
    ),
)
_PAIRS = _MASKED._replace(loss=masked_and_next_sentence_loss)
