"""Labels of texts, or of pairs of texts: `label<TAB>text` or `label<TAB>premise<TAB>hypothesis`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from experiments.harness.runs.records import is_record_file, read_fields
from experiments.harness.training.finetuning import Examples, LabelledBatch, padded
from experiments.language_modelling.load_run import LoadedRun
from experiments.language_modelling.stdlib_classification import Labelled, Part, snippets
from experiments.language_modelling.tasks.rows import (
    Scored,
    TaskData,
    frame_of,
    pair_frame,
)
from experiments.language_modelling.wikitext_classification import passages, word_order
from jaxformer.errors import ConfigError, DataError
from jaxformer.nn.heads import Classifier
from jaxformer.nn.models import EncoderOnly
from jaxformer.pretrained import is_pretrained
from jaxformer.text.data import read_lines, read_tab_pairs
from jaxformer.text.tokenizers import Tokenizer
from jaxformer.training.losses import classification_loss

_FIELDS = ("label", "premise", "hypothesis")
_LABELLED: dict[str, Callable[[Part], Labelled]] = {
    "python_stdlib": snippets,
    "articles": passages,
    "word_order": word_order,
}


class LabelledPairs(NamedTuple):
    """Pairs of texts with labels, as in natural language inference."""

    labels: list[str]
    texts: list[str]
    seconds: list[str]


def read_labelled(path: str) -> Labelled:
    """The lines label<TAB>text of a file; a further tab ends the text.

    Raises `DataError` naming the first line without a label or a text, and as `read_lines` does.
    """
    found = Labelled(*read_tab_pairs(path))
    for number, (label, text) in enumerate(zip(*found, strict=True), start=1):
        if not label.strip() or not text.strip():
            raise DataError(f"{path}:{number}: needed label<TAB>text, got {label!r} and {text!r}")
    return found


def read_pairs(path: str) -> LabelledPairs:
    """The lines label<TAB>premise<TAB>hypothesis, or records with these fields (.jsonl, .parquet).

    Raises `DataError` naming the first line without all three.
    """
    if is_record_file(path):
        rows = list(read_fields(path, _FIELDS))
    else:
        rows = [tuple(line.split("\t")[:3]) for line in read_lines(path)]
    for number, row in enumerate(rows, start=1):
        if len(row) < 3 or not all(text.strip() for text in row):
            raise DataError(
                f"{path}:{number}: needed label<TAB>premise<TAB>hypothesis, got "
                f"{len(row)} columns: {' '.join(map(repr, row))}"
            )
    return LabelledPairs(*(list(column) for column in zip(*rows, strict=True)))


def snippet_pairs(part: Any) -> LabelledPairs:
    """Halves of snippets of the standard library: does the second follow the first?

    Every other first half is followed by its own second half, the others by that of the next but
    one.
    """
    texts = snippets(part).texts
    halves = [_halves(text) for text in texts]
    labels = ["other" if i % 2 else "follows" for i in range(len(halves))]
    seconds = [halves[(i + 2 * (i % 2)) % len(halves)][1] for i in range(len(halves))]
    return LabelledPairs(labels, [first for first, _ in halves], seconds)


def check(train: Any, test: Any, paths: tuple[str, str], num_train: int) -> None:
    """Raises `DataError` for a test label that is not learned, `ConfigError` for `num_train`."""
    kinds = sorted(set(train.labels))
    for number, label in enumerate(test.labels, start=1):
        if label not in kinds:
            raise DataError(f"{paths[1]}:{number}: no line of {paths[0]} has the label {label!r}")
    if len(kinds) < 2:
        raise DataError(f"{paths[0]}: all lines have the label {kinds[0]!r}: two labels are needed")
    if num_train and not len(kinds) <= num_train <= len(train.texts):
        raise ConfigError(
            f"num_train={num_train}, but there are {len(train.texts)} texts of "
            f"{len(kinds)} kinds to learn from: give a number between these"
        )


def make_classification(
    options: Any, loaded: LoadedRun, backbone: Any, train: Any, test: Any
) -> TaskData:
    """The classifier on `backbone`, and the texts or pairs as ids.

    Published encoders without a pooler get a new one: their classifiers have it.
    """
    if isinstance(backbone, EncoderOnly) and is_pretrained(options.run):
        backbone = backbone.clone(config=replace(backbone.config, pooler="tanh"))
    kinds = sorted(set(train.labels))
    length = min(options.seq_len, backbone.config.max_len)
    if isinstance(train, LabelledPairs):
        as_rows = partial(encode_pairs, kinds=kinds, loaded=loaded, length=length)
    else:
        as_rows = partial(
            encode,
            kinds=kinds,
            tokenizer=loaded.tokenizer,
            length=length,
            frame=frame_of(loaded),
        )
    model = Classifier(backbone, len(kinds), options.pooling)

    def outputs(params: Any, batch: LabelledBatch) -> Any:
        return apply(model, params, batch)

    def score(logits: np.ndarray) -> Scored:
        numbers = np.argmax(logits, axis=-1)
        accuracy = float(np.mean(numbers == rows.labels))
        lines = zip((kinds[number] for number in numbers), *test, strict=True)
        return Scored({"accuracy": accuracy}, ["\t".join(line) for line in lines])

    rows = as_rows(test)
    commonest = max(map(test.labels.count, set(test.labels))) / len(test.labels)
    title = f"share of {len(test.labels)} test texts right (the commonest label: {commonest:.1%})"
    loss = classification_loss(model)
    return TaskData(as_rows(train), rows, model, loss, outputs, score, title, labels=kinds)


def apply(model: Any, params: Any, batch: LabelledBatch) -> Any:
    """What the model returns for the rows of `batch`."""
    types = () if batch.token_type_ids is None else (batch.token_type_ids,)
    return model.apply({"params": params}, batch.tokens, batch.padding_mask, *types)


def encode(
    labelled: Labelled,
    kinds: list[str],
    tokenizer: Tokenizer,
    length: int,
    frame: tuple[list[int], list[int]],
) -> Examples:
    """The texts as ids between the two lists of `frame`, cut to `length` ids in all."""
    room = length - sum(map(len, frame))
    ids = tokenizer.encode_batch(labelled.texts)
    rows = [[*frame[0], *row[:room], *frame[1]] for row in ids]
    labels = np.array([kinds.index(label) for label in labelled.labels], np.int32)
    return padded(rows, labels, tokenizer.special.pad, length)


def encode_pairs(
    pairs: LabelledPairs, *, kinds: list[str], loaded: LoadedRun, length: int
) -> Examples:
    """The pairs as ids in one row, the longer text cut first; with token types for an encoder."""
    frame, tokenizer = pair_frame(loaded), loaded.tokenizer
    sides = (tokenizer.encode_batch(texts) for texts in (pairs.texts, pairs.seconds))
    rows, types = [], []
    for first, second in zip(*sides, strict=True):
        a, b = _longest_first(len(first), len(second), length - frame.size)
        ids, kind = frame.row(first[:a], second[:b])
        rows.append(ids)
        types.append(kind)
    labels = np.array([kinds.index(label) for label in pairs.labels], np.int32)
    return padded(rows, labels, tokenizer.special.pad, length, types if has_types(loaded) else None)


def has_types(loaded: LoadedRun) -> bool:
    """Whether the run's model tells the two texts of a pair apart by token types."""
    config = loaded.model.config
    return bool(config.num_encoder_layers) and config.embeddings.num_types > 1


def _longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """How many ids of texts of `a` and `b` ids are kept, so that both fit into `room`."""
    if a + b <= room:
        return a, b
    short = min(a, b, room // 2)
    return (short, room - short) if a <= b else (room - short, short)


def _halves(text: str) -> tuple[str, str]:
    lines = text.split("\n")
    middle = len(lines) // 2
    return "\n".join(lines[:middle]), "\n".join(lines[middle:])


def read(options: Any) -> tuple[Any, Any]:
    """The texts or pairs to learn from and to test with, as `options` say."""
    pairs = options.task == "pairs"
    if options.train:
        from_file = read_pairs if pairs else read_labelled
        train, test = from_file(options.train), from_file(options.test)
    else:
        made = snippet_pairs if pairs else _LABELLED[options.examples]
        train, test = made("train"), made("test")
    check(train, test, (options.train, options.test), options.num_train)
    return train, test
