"""Labels of texts, or of pairs of texts: `label<TAB>text` or `label<TAB>premise<TAB>hypothesis`."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn

from experiments.harness.runs.records import read_fields
from experiments.harness.runs.source_kinds import kind_of
from experiments.language_modelling.finetune_presets import FinetuneConfig
from experiments.language_modelling.tasks.examples import snippets
from experiments.language_modelling.tasks.finetune_task import Encoded, FinetuneTask, Scored
from experiments.language_modelling.tasks.rows import (
    Row,
    in_blocks,
    inputs,
    row_tokenizer,
    rows_of,
    write_facts,
)
from jaxformer.errors import DataError, shorten
from jaxformer.nn.heads import Classifier
from jaxformer.text.data import read_lines
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import classification_loss

_TEXT_FIELDS = "label", "text"
_PAIR_FIELDS = "label", "premise", "hypothesis"
_HEADER = {"label", "text", "sentence", "sentence1", "sentence2", "premise", "hypothesis"}
_MANY = 10
"""From so many examples on, labels that are all different are no labels."""


def read(config: FinetuneConfig, path: str) -> list[tuple[str, ...]]:
    """(label, text) or (label, premise, hypothesis) of each line of a file.

    A further tab ends the last text, a first line that names the columns is left out, and so is
    white space around a label. A file of records (.jsonl, .parquet) has these fields. Raises
    `DataError` naming the first line without one of them, and as `read_lines` does.
    """
    names = _PAIR_FIELDS if config.task.kind == "pairs" else _TEXT_FIELDS
    if kind_of(path) in ("json lines", "parquet"):
        rows: list[Sequence[str]] = list(read_fields(path, names))
    else:
        rows = [line.split("\t")[: len(names)] for line in read_lines(path)]
        rows = rows[_has_header(path, rows) :]
    for number, row in enumerate(rows, start=1):
        if len(row) < len(names) or not all(text.strip() for text in row):
            raise DataError(
                f"{path}:{number}: needed {'<TAB>'.join(names)}, got {len(row)} columns: "
                f"{' '.join(map(repr, row))}"
            )
    return [(label.strip(), *texts) for label, *texts in rows]


def _has_header(path: str, rows: Sequence[Sequence[str]]) -> bool:
    """Whether the first line names the columns; `DataError` where the label is not the first."""
    names = [name.strip().lower() for name in rows[0]] if rows else []
    if "label" in names[1:] and set(names) <= _HEADER:
        raise DataError(
            f"{path}:1: the label is in column {names.index('label') + 1}: put it into the first"
        )
    return names[:1] == ["label"] and all(row[0].strip().lower() != "label" for row in rows[1:])


def built_in(part: str) -> list[tuple[str, ...]]:
    """Snippets of the standard library, each labelled with its package."""
    return [*snippets("test" if part == "test" else "train")]


def make_model(config: FinetuneConfig, backbone: nn.Module, labels: Sequence[str]) -> Classifier:
    """A classifier by `labels` on `backbone`; on a decoder without a bias, to be exported."""
    return Classifier(
        backbone, len(labels), config.task.pooling, use_bias=config.objective == "masked"
    )


def facts(
    config: FinetuneConfig, folder: Path, tokenizer: Tokenizer, items: Sequence[Any]
) -> list[str]:
    """The labels that are learned; `DataError` for fewer than two, and for one in each example."""
    labels = sorted({label for label, *_ in items})
    if len(labels) < 2:
        raise DataError(f"all texts have the label {labels[0]!r}: two labels are needed")
    if len(labels) == len(items) >= _MANY:
        raise DataError(
            f"each of the {len(items)} training examples has a label of its own, such as "
            f"{shorten(repr(labels[0]))}: the label stands before the text"
        )
    return labels


def encode(
    config: FinetuneConfig, tokenizer: Tokenizer, items: Sequence[Any], facts: Sequence[str]
) -> Encoded:
    """The texts or pairs as rows; see `row_tokenizer`."""
    for label, *_ in items:
        if label not in facts:
            raise DataError(f"no training text has the label {label!r}: leave its texts out")
    numbers = np.array([facts.index(label) for label, *_ in items], np.int32)
    library = row_tokenizer(config, tokenizer)
    rows: list[Row] = []
    for block in in_blocks(items):
        check_readable(tokenizer, block, first=len(rows) + 1)
        texts = [row[1] if len(row) == 2 else row[1:] for row in block]
        rows += map(Row.of, library.encode_batch(texts))
    return Encoded(items, rows_of(config, tokenizer, rows, numbers))


def check_readable(tokenizer: Tokenizer, items: Sequence[Any], first: int) -> None:
    """Raises `DataError`, naming the example, for a text that `tokenizer` cannot read.

    The examples are numbered from `first` on.
    """
    with contextlib.suppress(DataError):
        tokenizer.encode_batch([text for _, *texts in items for text in texts])
        return
    for number, (_, *texts) in enumerate(items, start=first):
        for text in texts:
            try:
                tokenizer.encode(text)
            except DataError as error:
                raise DataError(f"example {number}: {error}") from error


def outputs(model: Any) -> Callable[[Any, Any], Any]:
    """The logits of each row [B, C]."""
    return lambda params, batch: model.apply({"params": params}, *inputs(batch))


def score(
    config: FinetuneConfig, logits: np.ndarray, text: Encoded, labels: Sequence[str]
) -> Scored:
    """The share of labels that are right."""
    best = [labels[number] for number in np.argmax(logits, axis=-1)]
    right = [str(label) for label, *_ in text.items]
    accuracy = float(np.mean([a == b for a, b in zip(best, right, strict=True)]))
    sources = [" / ".join(texts) for _, *texts in text.items]
    table: dict[str, Any] = {"source": sources, "model": best, "reference": right}
    return Scored({"accuracy": accuracy}, table)


CLASSIFICATION = FinetuneTask(
    scores=("validation_accuracy",),
    loss=classification_loss,
    read=read,
    facts=facts,
    write_facts=write_facts,
    encode=encode,
    make_model=make_model,
    inputs=inputs,
    outputs=outputs,
    score=score,
    built_in=built_in,
)
