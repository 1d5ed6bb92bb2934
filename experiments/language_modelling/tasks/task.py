"""A fine-tuning task, and the rows of ids that its model reads."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from flax import linen as nn

from experiments.harness.training.finetuning import Examples, LabelledBatch
from experiments.language_modelling.load_run import LoadedRun
from jaxformer import optional_dependencies
from jaxformer.distributed import strategy_of
from jaxformer.errors import DataError
from jaxformer.nn.models import DecoderOnly
from jaxformer.training.losses import Loss

if TYPE_CHECKING:
    import tokenizers


class Scored(NamedTuple):
    """The scores of the test texts, the one to report first, and a line of output for each."""

    metrics: dict[str, float]
    lines: list[str]


class Task(NamedTuple):
    """A model with its examples, its loss and its score.

    `outputs(params, batch)` [B, ...] of the test rows, all of them [N, ...] in order, are what
    `score` reads. `title` says what the first score is. A saved model gets the names `labels` of
    its classes, and `files`, text by name, beside its own.
    """

    model: nn.Module
    train: Examples
    test: Examples
    loss: Loss
    outputs: Callable[[Any, LabelledBatch], Any]
    score: Callable[[np.ndarray], Scored]
    title: str
    files: Mapping[str, str] = MappingProxyType({})
    labels: Sequence[str] = ()


def predict(task: Task, params: Any, rows: int) -> np.ndarray:
    """The outputs of all test rows [N, ...] in order, computed `rows` at a time.

    The devices that have `params` share them.
    """
    devices = strategy_of(params)

    def outputs(batch: LabelledBatch) -> np.ndarray:
        with devices.active():
            computed = devices.gather(task.outputs(params, devices.divide(batch)))
        return computed[:rows][batch.loss_mask]

    return np.concatenate([outputs(batch) for batch in task.test.iterate_once(rows)])


def apply(model: Any, params: Any, batch: LabelledBatch) -> Any:
    """The outputs of `model` for the rows of `batch`."""
    types = () if batch.token_type_ids is None else (batch.token_type_ids,)
    return model.apply({"params": params}, batch.tokens, batch.padding_mask, *types)


def row_tokenizer(loaded: LoadedRun, length: int) -> "tokenizers.Tokenizer":
    """The run's tokenizer, giving rows of `length` ids of a text or a pair, cut and padded.

    The longer text of a pair is cut first. Around the texts stands what the tokenizer's own
    template says, or else what stood there in pretraining; a causal model reads a line feed between
    the texts, and no end: it has never read one, and a text's vector is that of its last token.
    """
    special = loaded.tokenizer.special
    tokenizer = copy.deepcopy(loaded.tokenizer.library_tokenizer)
    tokenizer.encode_special_tokens = True  # a copy forgets it
    is_causal = isinstance(loaded.model, DecoderOnly)
    if is_causal or None not in tokenizer.encode("a", "a").sequence_ids:
        begins = not is_causal or loaded.config.data.isolate_documents
        end = [] if special.eos is None or is_causal else [special.eos]
        between = end
        if is_causal:
            with contextlib.suppress(DataError):  # a vocabulary of characters may lack it
                between = loaded.tokenizer.encode("\n")
        begin = [special.bos] if begins and special.bos is not None else []
        ids = {"begin": begin, "between": between, "end": end}
        first, middle, last = ([name] if ids[name] else [] for name in ids)
        tokenizer.post_processor = optional_dependencies.load(
            "tokenizers.processors"
        ).TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *middle, "$B:1", *(f"{name}:1" for name in last)],
            special_tokens=[
                {"id": x, "ids": ids[x], "tokens": list(map(tokenizer.id_to_token, ids[x]))}
                for x in (*first, *middle, *last)
            ],
        )
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=special.pad or 0)
    return tokenizer


def rows_of(
    loaded: LoadedRun, encodings: Sequence["tokenizers.Encoding"], labels: np.ndarray
) -> Examples:
    """Rows as arrays, with token types where the run's model tells two texts apart by them."""
    config = loaded.model.config
    has_types = bool(config.num_encoder_layers) and config.embeddings.num_types > 1
    return Examples(
        np.array([each.ids for each in encodings], np.int32),
        np.array([each.attention_mask for each in encodings], bool),
        labels,
        np.array([each.type_ids for each in encodings], np.int32) if has_types else None,
    )
