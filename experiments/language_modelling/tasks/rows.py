"""What a task makes of a run and its texts, and the ids that frame a text or a pair."""

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


class TaskData(NamedTuple):
    """What a task makes of a run and its texts.

    `model` learns `train` by `loss`. `outputs(params, batch)` [B, ...] of the test rows, all of
    them [N, ...] in order, are what `score` reads. `title` says what the first score is. A saved
    model gets the names `labels` of its classes, and `files`, text by name, beside its own.
    """

    train: Examples
    test: Examples
    model: nn.Module
    loss: Loss
    outputs: Callable[[Any, LabelledBatch], Any]
    score: Callable[[np.ndarray], Scored]
    title: str
    files: Mapping[str, str] = MappingProxyType({})
    labels: Sequence[str] = ()


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
    of = pair.sequence_ids
    if 0 not in of or 1 not in of or None not in of:
        return Frame(begin, end, end)
    first, second = of.index(0), of.index(1)
    last = len(of) - of[::-1].index(1)
    between = next(i for i in range(first, second) if of[i] is None)
    types = pair.type_ids[first], pair.type_ids[second]
    return Frame(pair.ids[:first], pair.ids[between:second], pair.ids[last:], types)
