"""Labels of texts, or of pairs of texts: `label<TAB>text` or `label<TAB>premise<TAB>hypothesis`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from experiments.harness.runs.sources import is_record_file, read_fields
from experiments.harness.training.finetuning import Examples, LabelledBatch
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.tasks.examples import Labelled, snippets
from experiments.language_modelling.tasks.task import Scored, Task, apply, row_tokenizer, rows_of
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import Classifier
from jaxformer.nn.models import EncoderOnly
from jaxformer.pretrained import is_pretrained
from jaxformer.text.data import read_lines
from jaxformer.training.losses import classification_loss

_FIELDS = ("label", "text"), ("label", "premise", "hypothesis")


def read(options: Any) -> tuple[Labelled, Labelled]:
    """The texts or pairs to learn from and to test with, as `options` say.

    Raises `DataError` for a test label that is not learned, `ConfigError` for `num_train`.
    """
    is_pairs = options.task == "pairs"
    if options.train:
        train, test = (read_labelled(x, pairs=is_pairs) for x in (options.train, options.test))
    else:
        train, test = snippets("train"), snippets("test")
    kinds = sorted(set(train.labels))
    for number, label in enumerate(test.labels, start=1):
        if label not in kinds:
            raise DataError(
                f"{options.test}:{number}: no line of {options.train} has the label {label!r}"
            )
    if len(kinds) < 2:
        raise DataError(
            f"{options.train}: all lines have the label {kinds[0]!r}: two labels are needed"
        )
    if options.num_train and not len(kinds) <= options.num_train <= len(train.texts):
        raise ConfigError(
            f"num_train={options.num_train}, but there are {len(train.texts)} texts of "
            f"{len(kinds)} kinds to learn from: give a number between these"
        )
    return train, test


def read_labelled(path: str, *, pairs: bool = False) -> Labelled:
    """The lines label<TAB>text, or of pairs label<TAB>premise<TAB>hypothesis, of a file.

    A further tab ends the last text. A file of records (.jsonl, .parquet) has these fields. Raises
    `DataError` naming the first line without one of them, and as `read_lines` does.
    """
    names = _FIELDS[pairs]
    rows: Sequence[Sequence[str]]
    if is_record_file(path):
        rows = list(read_fields(path, names))
    else:
        rows = [line.split("\t")[: len(names)] for line in read_lines(path)]
    for number, row in enumerate(rows, start=1):
        if len(row) < len(names) or not all(text.strip() for text in row):
            raise DataError(
                f"{path}:{number}: needed {'<TAB>'.join(names)}, got {len(row)} columns: "
                f"{' '.join(map(repr, row))}"
            )
    return Labelled(*(list(column) for column in zip(*rows, strict=True)))


def make(options: Any, loaded: LoadedRun, train: Labelled, test: Labelled) -> Task:
    """The task of a classifier on the run's model.

    Published encoders without a pooler get a new one: their classifiers have it.
    """
    backbone = loaded.model
    if isinstance(backbone, EncoderOnly) and is_pretrained(options.run):
        backbone = backbone.clone(config=replace(backbone.config, pooler="tanh"))
    kinds = sorted(set(train.labels))
    length = min(options.seq_len, backbone.config.max_len)
    trained, tested = (encode(each, kinds, loaded, length) for each in (train, test))
    model = Classifier(backbone, len(kinds), options.pooling)

    def outputs(params: Any, batch: LabelledBatch) -> Any:
        return apply(model, params, batch)

    def score(logits: np.ndarray) -> Scored:
        numbers = np.argmax(logits, axis=-1)
        accuracy = float(np.mean(numbers == tested.labels))
        columns = [column for column in test if column is not None]
        lines = zip((kinds[number] for number in numbers), *columns, strict=True)
        return Scored({"accuracy": accuracy}, ["\t".join(line) for line in lines])

    commonest = max(map(test.labels.count, set(test.labels))) / len(test.labels)
    title = f"share of {len(test.labels)} test texts right (the commonest label: {commonest:.1%})"
    loss = classification_loss(model)
    return Task(model, trained, tested, loss, jax.jit(outputs), score, title, labels=kinds)


def encode(labelled: Labelled, kinds: list[str], loaded: LoadedRun, length: int) -> Examples:
    """The texts or pairs as rows of `length` ids; see `row_tokenizer`."""
    labels = np.array([kinds.index(label) for label in labelled.labels], np.int32)
    loaded.tokenizer.encode_batch([*labelled.texts, *(labelled.seconds or ())])  # or `DataError`
    texts: list[Any] = labelled.texts
    if labelled.seconds is not None:
        texts = list(zip(texts, labelled.seconds, strict=True))
    return rows_of(loaded, row_tokenizer(loaded, length).encode_batch(texts), labels)
