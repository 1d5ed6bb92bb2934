"""A fine-tuning task, and the ids that frame a text or a pair of texts."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from flax import linen as nn

from experiments.harness.training.finetuning import Examples, LabelledBatch
from experiments.language_modelling.load_run import LoadedRun
from jaxformer.nn.models import DecoderOnly
from jaxformer.training.losses import Loss


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
    """The outputs of all test rows [N, ...] in order, computed `rows` at a time."""
    batches = task.test.iterate_once(rows)
    return np.concatenate([np.asarray(task.outputs(params, x))[x.loss_mask] for x in batches])


def apply(model: Any, params: Any, batch: LabelledBatch) -> Any:
    """The outputs of `model` for the rows of `batch`."""
    types = () if batch.token_type_ids is None else (batch.token_type_ids,)
    return model.apply({"params": params}, batch.tokens, batch.padding_mask, *types)


class Frame(NamedTuple):
    """The ids before, between and after the two texts of a pair, and the types of these parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: tuple[int, int] = (0, 1)

    @property
    def size(self) -> int:
        """The number of ids that are not of the texts."""
        return len(self.before) + len(self.between) + len(self.after)

    def row(self, first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
        """The ids of a pair, and the type of each."""
        ids = [*self.before, *first, *self.between, *second, *self.after]
        count = len(self.before) + len(first) + len(self.between)
        return ids, [self.types[0]] * count + [self.types[1]] * (len(ids) - count)


def frame_of(loaded: LoadedRun) -> tuple[list[int], list[int]]:
    """The ids that the run's model reads before and after a text."""
    special = loaded.tokenizer.special
    begin = [] if special.bos is None else [special.bos]
    end = [] if special.eos is None else [special.eos]
    if not isinstance(loaded.model, DecoderOnly):
        return begin, end
    # A causal model has never read the end token, and a text's vector is that of its last token.
    return (begin, []) if loaded.config.data.isolate_documents else ([], [])


def pair_frame(loaded: LoadedRun) -> Frame:
    """The frame of a pair: that of the tokenizer's own template, or else as in pretraining.

    A causal model reads a line feed between the texts.
    """
    begin, end = frame_of(loaded)
    if isinstance(loaded.model, DecoderOnly):
        return Frame(begin, loaded.tokenizer.encode("\n"), end)
    pair = loaded.tokenizer.library_tokenizer.encode("a", "a")
    sides = pair.sequence_ids
    if 0 not in sides or 1 not in sides or None not in sides:
        return Frame(begin, end, end)
    first, second = sides.index(0), sides.index(1)
    last = len(sides) - sides[::-1].index(1)
    between = next(i for i in range(first, second) if sides[i] is None)
    types = pair.type_ids[first], pair.type_ids[second]
    return Frame(pair.ids[:first], pair.ids[between:second], pair.ids[last:], types)


def has_types(loaded: LoadedRun) -> bool:
    """Whether the run's model tells the two texts of a pair apart by token types."""
    config = loaded.model.config
    return bool(config.num_encoder_layers) and config.embeddings.num_types > 1
