"""Texts as rows of ids for the models of several tasks."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.harness.training.rows import LabelledBatch
from experiments.language_modelling.finetune_presets import FACTS, FinetuneConfig
from jaxformer import optional_dependencies
from jaxformer.errors import DataError
from jaxformer.records import Record
from jaxformer.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    import tokenizers


def write_facts(folder: Path, facts: Any) -> None:
    """Keeps the labels in the run's `folder`, which a command that loads it reads."""
    Record(folder / FACTS).write({"labels": list(facts)})


def inputs(batch: LabelledBatch) -> tuple[Any, ...]:
    """The arguments of a model with a head."""
    types = () if batch.token_type_ids is None else (batch.token_type_ids,)
    return batch.tokens, batch.padding_mask, *types


def row_tokenizer(config: FinetuneConfig, tokenizer: Tokenizer) -> "tokenizers.Tokenizer":
    """The tokenizer, giving rows of `data.seq_len` ids of a text or a pair, cut and padded.

    The longer text of a pair is cut first. Around the texts stands what the tokenizer's own
    template says, or else what stood there in pretraining; a causal model reads a line feed between
    the texts, and no end: it has never read one, and a text's vector is its last token's.
    """
    special, is_causal = tokenizer.special, config.objective == "causal"
    library = tokenizer.to_library()
    if is_causal or None not in library.encode("a", "a").sequence_ids:
        begins = not is_causal or config.data.isolate_documents
        end = [] if special.eos is None or is_causal else [special.eos]
        between = end
        if is_causal:
            with contextlib.suppress(DataError):  # a vocabulary of characters may lack it
                between = tokenizer.encode("\n")
        begin = [special.bos] if begins and special.bos is not None else []
        ids = {"begin": begin, "between": between, "end": end}
        first, middle, last = ([name] if ids[name] else [] for name in ids)
        library.post_processor = optional_dependencies.load(
            "tokenizers.processors"
        ).TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *middle, "$B:1", *(f"{name}:1" for name in last)],
            special_tokens=[
                {"id": x, "ids": ids[x], "tokens": list(map(library.id_to_token, ids[x]))}
                for x in (*first, *middle, *last)
            ],
        )
    library.enable_truncation(config.data.seq_len)
    library.enable_padding(length=config.data.seq_len, pad_id=tokenizer.padding_id)
    return library


def rows_of(
    config: FinetuneConfig,
    tokenizer: Tokenizer,
    encodings: Sequence["tokenizers.Encoding"],
    labels: np.ndarray,
) -> LabelledBatch:
    """Rows as arrays, with token types where the model tells two texts apart by them.

    Raises `DataError` for a token that `tokenizer` has and the model lacks.
    """
    tokenizer.check_ids([each.ids for each in encodings])
    has_types = config.objective == "masked" and config.model.embeddings.num_types > 1
    count = len(encodings)
    return LabelledBatch(
        np.array([each.ids for each in encodings], np.int32),
        np.array([each.attention_mask for each in encodings], bool),
        labels,
        np.ones(count, bool),
        np.arange(count, dtype=np.int32),
        np.array([each.type_ids for each in encodings], np.int32) if has_types else None,
    )
