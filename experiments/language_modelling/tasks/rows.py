"""Texts as rows of ids for the models of several tasks."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from experiments.harness.training.rows import LabelledBatch
from experiments.language_modelling.finetune_presets import FACTS, FinetuneConfig
from jaxformer import optional_dependencies
from jaxformer.errors import DataError
from jaxformer.records import Record
from jaxformer.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    import tokenizers

Item = TypeVar("Item")

_TEXTS_AT_ONCE = 1_000


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


class Row(NamedTuple):
    """The arrays [T] of a row: a tenth of the memory of the library's encoding."""

    ids: np.ndarray
    mask: np.ndarray
    """True at tokens, False at padding."""
    types: np.ndarray
    """0 at tokens of the first text, 1 at tokens of the second."""

    @classmethod
    def of(cls, encoding: "tokenizers.Encoding") -> "Row":
        """The arrays of an encoding."""
        return cls(
            np.array(encoding.ids, np.int32),
            np.array(encoding.attention_mask, bool),
            np.array(encoding.type_ids, np.int8),
        )


def in_blocks(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """`items` in blocks that are encoded at once: the encodings of all would need much memory."""
    for start in range(0, len(items), _TEXTS_AT_ONCE):
        yield items[start : start + _TEXTS_AT_ONCE]


def rows_of(
    config: FinetuneConfig, tokenizer: Tokenizer, rows: Sequence[Row], labels: np.ndarray
) -> LabelledBatch:
    """The rows as a batch, with token types where the model tells two texts apart by them.

    Raises `DataError` for a token that `tokenizer` has and the model lacks.
    """
    tokenizer.check_ids([row.ids for row in rows])
    has_types = config.objective == "masked" and config.model.embeddings.num_types > 1
    count = len(rows)
    return LabelledBatch(
        np.array([row.ids for row in rows]),
        np.array([row.mask for row in rows]),
        labels,
        np.ones(count, bool),
        np.arange(count, dtype=np.int32),
        np.array([row.types for row in rows], np.int32) if has_types else None,
    )
